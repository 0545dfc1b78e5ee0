"""The data of two real processes: they take up where one stopped, and agree on chunks that come while they train."""

import pytest

from packhorse.cache import open_cache
from test_ddp import finish, place, rows, start  # noqa: F401 (a fixture)


@pytest.mark.slow
def test_two_processes_go_on_where_one_stopped_with_another_global_batch(place):  # noqa: F811
    assert finish(start(place, "whole", "--data.micro_batch_size=4")) == 0
    half = ("--data.micro_batch_size=4", "--trainer.max_steps=6")
    assert finish(start(place, "half", *half)) == 0
    saved = place / "half/version_0/checkpoints/last.ckpt"
    assert finish(start(place, "rest", "--trainer.devices=2", "--data.micro_batch_size=1", f"--ckpt_path={saved}")) == 0
    whole, rest = rows(place, "whole", 1), rows(place, "rest", 2)
    assert sorted(rest) == list(range(6, 12))
    expected = [row for step in range(6, 12) for row in whole[step]]
    assert [row for step in rest for row in rest[step]] == expected[: 6 * 2]


@pytest.mark.slow
def test_two_processes_agree_on_chunks_that_are_built_while_they_train(place):  # noqa: F811
    settings = ("--data.start_after_chunks=1", "--data.sequences_per_chunk=20", f"--data.cache_dir={place / 'growing'}")
    two = start(place, "live", "--trainer.devices=2", "--trainer.max_steps=-1", "--trainer.max_epochs=1", *settings)
    assert finish(two) == 0, (place / "live.err").read_text()
    assert "dataset expanded" in (place / "live.err").read_text()
    (recipe,) = (place / "growing").glob("*/recipe.json")
    sequences = open_cache(recipe.parent).num_sequences("train")
    trained = [tuple(row) for step in rows(place, "live", 2).values() for row in step]
    assert len(trained) == sequences // 4 * 4
