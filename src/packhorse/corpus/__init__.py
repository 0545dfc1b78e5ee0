"""Text -> sequences, without torch."""
