"""The hall: the only room that knows the others, and Lightning."""
