"""A tokenizer -> the same one, with BOS before every text or without: as the texts of a training were encoded.

A recipe may put BOS where the tokenizer's own template does not, or leave it out where the template has it. Whoever
reads with the model afterwards must do as the recipe did, transformers and lm-eval among them: these look at the
template in tokenizer.json alone.
"""

import json

from tokenizers import Tokenizer

from packhorse.corpus.tokenizer import TokenizerContent, tokenizer_of_files
from packhorse.errors import TokenizerError


def with_bos(content: TokenizerContent, bos_id: int | None) -> TokenizerContent:
    """The tokenizer with this BOS before every text; what agrees already stays as it is, to the byte.

    Args:
        content: A tokenizer; a slow one stays as it is.
        bos_id: The token before every text, None for none.

    Raises:
        TokenizerError: it has no such token.
    """
    if not content.json:
        return content
    tokenizer = Tokenizer.from_str(content.json)
    if bos_id is not None and tokenizer.id_to_token(bos_id) is None:
        raise TokenizerError(
            f"The model was trained with the token {bos_id} before every text, which this tokenizer does not have.\n"
            "Give the model's own."
        )
    agrees = _puts(tokenizer, bos_id)
    if agrees and content.facts.adds_bos == (bos_id is not None):
        return content
    config = json.loads(content.files["tokenizer_config.json"]) | {"add_bos_token": bos_id is not None}
    text = content.json
    if bos_id is not None:
        config["bos_token"] = tokenizer.id_to_token(bos_id)
    if not agrees:
        text = json.dumps(json.loads(text) | {"post_processor": _template(tokenizer, bos_id)}, ensure_ascii=False)
    files = {"tokenizer.json": text.encode(), "tokenizer_config.json": json.dumps(config).encode()}
    return tokenizer_of_files({**content.files, **files})


def _puts(tokenizer: Tokenizer, bos_id: int | None) -> bool:
    plain, with_template = (tokenizer.encode("a", add_special_tokens=flag).ids for flag in (False, True))
    expected = plain if bos_id is None else [bos_id, *plain]
    return with_template[: len(expected)] == expected


def _template(tokenizer: Tokenizer, bos_id: int | None) -> dict | None:
    """What tokenizer.json calls `post_processor`."""
    if bos_id is None:
        return None
    bos = tokenizer.id_to_token(bos_id)
    one, other = ([{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": x, "type_id": 0}}] for x in "AB")
    tokens = {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}}
    return {"type": "TemplateProcessing", "single": one, "pair": one + other, "special_tokens": tokens}
