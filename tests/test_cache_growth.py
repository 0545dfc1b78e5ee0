"""Laws of growth: what is there stays, in its place and on its side; only the new is added, once."""

import gzip
import json
import shutil

import numpy as np
import pytest

from conftest import all_tokens, documents_in, make_texts, payloads, texts_in, write_jsonl, write_parquet
from packhorse.cache import Cache, planner
from packhorse.cache.plan import Plan
from packhorse.errors import SourceChangedError, SourceError

TEXTS = make_texts(120, seed=1, words=20)


def sides(cache) -> dict[tuple, int]:
    """Document -> its side of the split."""
    ids = documents_in(cache)
    flags = [side for n in range(cache.snapshot.num_chunks) for side in cache.chunk(n).side("document_sides").tolist()]
    return dict(zip(map(tuple, ids), flags, strict=True))


class Longer:
    """An iterable that has more texts every time."""

    def __init__(self, texts, fingerprint=None):
        self.texts = texts
        if fingerprint:
            self.fingerprint = fingerprint

    def __iter__(self):
        return iter(self.texts)


def more_documents(folder):
    path = str(write_parquet(folder / "a.parquet", TEXTS, rows=13))
    return (path, {"max_documents": 55}), (path, {"max_documents": 97})


def more_lines(folder):
    path = str(write_jsonl(folder / "a.jsonl", TEXTS))
    return (path, {"max_documents": 55}), (path, {"max_documents": None})


def new_file(folder):
    write_jsonl(folder / "a.jsonl", TEXTS[:70])
    return (str(folder), {}), lambda: (write_parquet(folder / "b.parquet", TEXTS[70:]) and str(folder), {})


def new_source(folder):
    first, second = str(write_jsonl(folder / "a.jsonl", TEXTS[:70])), str(write_jsonl(folder / "b.jsonl", TEXTS[70:]))
    return ([first], {}), ([first, second], {})


def appended_lines(folder):
    path = write_jsonl(folder / "a.jsonl", TEXTS[:70])
    return (str(path), {}), lambda: (str(write_jsonl(path, TEXTS[70:], "a")), {})


def appended_behind_a_limit(folder):
    path = write_jsonl(folder / "a.jsonl", TEXTS[:70])
    return (str(path), {"max_documents": 50}), lambda: (str(write_jsonl(path, TEXTS[70:], "a")), {})


def longer_iterable(folder):
    return (Longer(TEXTS[:70]), {}), (Longer(TEXTS), {})


def longer_iterable_with_a_fingerprint(folder):
    return (Longer(TEXTS[:70], "1"), {}), (Longer(TEXTS, "2"), {})


def less_limited_iterable(folder):
    return (Longer(TEXTS), {"max_documents": 41}), (Longer(TEXTS), {})


def compressed(folder):
    path = write_jsonl(folder / "a.jsonl", TEXTS)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    return (f"{path}.gz", {"max_documents": 33}), (f"{path}.gz", {})


def hub(folder):
    path = write_parquet(folder / "a.parquet", TEXTS)
    spec = {"path": "parquet", "data_files": str(path), "cache_dir": str(folder / "hf")}
    return (spec, {"max_documents": 33}), (spec, {})


GROWTH = [
    *(more_documents, more_lines, new_file, new_source, appended_lines, appended_behind_a_limit),
    *(longer_iterable, longer_iterable_with_a_fingerprint, less_limited_iterable, compressed, hub),
]


@pytest.mark.parametrize("grow", GROWTH)
def test_what_is_there_stays_and_only_the_new_is_added(grow, tmp_path, build):
    folder = tmp_path / "source"
    folder.mkdir()
    first, second = grow(folder)
    before = build(first[0], **first[1])
    n, old, old_sides, digest = before.snapshot.num_chunks, payloads(before), sides(before), before.snapshot.digest
    tokens = [all_tokens(before, split) for split in ("train", "eval")]
    source, settings = second() if callable(second) else second
    after = build(source, **settings)
    assert after.folder == before.folder
    assert after.snapshot.num_chunks > n
    assert payloads(after)[:n] == old
    assert Cache(after.folder, num_chunks=n).snapshot.digest == digest
    assert sides(after).items() >= old_sides.items()
    for split, expected in zip(("train", "eval"), tokens, strict=True):
        assert np.array_equal(after.read(range(len(expected)), split=split).tokens, expected)
        # A reader that was open all the time still reads what it was opened on.
        assert np.array_equal(before.read(range(len(expected)), split=split).tokens, expected)
    assert texts_in(after) == TEXTS[: settings.get("max_documents")]
    again = build(source, **settings)
    assert again.snapshot.digest == after.snapshot.digest


def test_a_reader_that_was_opened_before_a_cache_grew_goes_on(build, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS[:60])
    opened = build(str(source))
    expected = all_tokens(opened)
    fresh = Cache(opened.folder)  # has read no more than the header of an index page that will be replaced
    write_jsonl(source, TEXTS[60:], "a")
    grown = build(str(source))
    assert np.array_equal(all_tokens(fresh), expected)
    assert fresh.num_sequences() == len(expected) < grown.num_sequences()
    assert fresh.snapshot.digest == opened.snapshot.digest != grown.snapshot.digest
    with pytest.raises(IndexError):
        fresh.read([len(expected)])


def test_a_moved_source_folder_changes_nothing(build, tmp_path):
    (tmp_path / "here").mkdir()
    write_jsonl(tmp_path / "here/a.jsonl", TEXTS[:50])
    write_parquet(tmp_path / "here/b.parquet", TEXTS[50:80])
    before = build(str(tmp_path / "here"), name="moved")
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert build(str(tmp_path / "there"), name="moved").snapshot.digest == before.snapshot.digest
    write_jsonl(tmp_path / "there/c.jsonl", TEXTS[80:])
    assert texts_in(build(str(tmp_path / "there"), name="moved")) == TEXTS


def test_lines_appended_to_a_file_that_was_moved_are_continued(build, tmp_path):
    (tmp_path / "here").mkdir()
    write_jsonl(tmp_path / "here/a.jsonl", TEXTS[:40])
    build(str(tmp_path / "here"), name="moved")
    write_jsonl(tmp_path / "here/a.jsonl", TEXTS[40:70], "a")
    build(str(tmp_path / "here"), name="moved", max_documents=50)
    shutil.move(tmp_path / "here", tmp_path / "there")
    write_jsonl(tmp_path / "there/a.jsonl", TEXTS[70:], "a")
    assert texts_in(build(str(tmp_path / "there"), name="moved")) == TEXTS
    shutil.move(tmp_path / "there/a.jsonl", tmp_path / "a.jsonl")
    write_jsonl(tmp_path / "a.jsonl", ["one more"], "a")
    assert texts_in(build(str(tmp_path / "a.jsonl"), name="moved")) == [*TEXTS, "one more"]


def test_a_longer_file_of_the_same_name_beside_the_one_that_is_planned_is_another(build, tmp_path):
    for folder, texts in (("one", TEXTS[:30]), ("two", TEXTS[:50])):
        (tmp_path / "data" / folder).mkdir(parents=True)
        write_jsonl(tmp_path / "data" / folder / "a.jsonl", texts)
        cache = build(str(tmp_path / "data"), name="both")
    assert texts_in(cache) == TEXTS[:30] + TEXTS[:50]


@pytest.mark.parametrize("limit", ["max_documents", "max_chunks", "max_tokens"])
def test_what_a_limit_cut_off_of_a_finished_source_that_grew_is_planned_later(limit, build, tmp_path):
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data/a.jsonl", TEXTS[:20])
    first = build(str(tmp_path / "data"), sequences_per_chunk=4)
    assert texts_in(first) == TEXTS[:20]
    write_jsonl(tmp_path / "data/b.jsonl", TEXTS[20:])
    most = {"max_documents": 60, "max_chunks": first.snapshot.num_chunks + 3, "max_tokens": first.summary.tokens * 2}
    some = texts_in(build(str(tmp_path / "data"), sequences_per_chunk=4, **{limit: most[limit]}))
    assert 20 < len(some) < len(TEXTS)
    assert texts_in(build(str(tmp_path / "data"), sequences_per_chunk=4)) == TEXTS


def test_a_line_that_is_still_being_written_is_refused_or_left_until_it_is_whole(build, tmp_path):
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    path = tmp_path / "a.jsonl"
    for name, count in (("from the beginning", 3), ("grown", 60)):
        path.write_text("".join(lines[:count]))
        if name == "grown":
            build(str(path), name=name)
        with path.open("a") as stream:
            stream.write(lines[count][:-20])
        with pytest.raises(SourceError, match=r"ends in the middle of a line|line 4 is not valid JSON"):
            build(str(path), name=name)
        assert texts_in(build(str(path), name=f"{name}, skipped", invalid_rows="skip")) == TEXTS[:count]
        with path.open("a") as stream:
            stream.write(lines[count][-20:-1])  # whole, but for its end
        for each, more in ((name, {}), (f"{name}, skipped", {"invalid_rows": "skip"})):
            cache = build(str(path), name=each, **more)
            assert texts_in(cache) == TEXTS[: count + 1]
            assert cache.summary.rows_invalid == 0


def test_growth_that_dies_between_two_pages_is_planned_to_its_end_later(build, tmp_path, monkeypatch):
    settings = {"deduplicate": "exact", "sequences_per_chunk": 4}
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data/a.jsonl", TEXTS[:20])
    build(str(tmp_path / "data"), **settings)
    write_jsonl(tmp_path / "data/b.jsonl", TEXTS[20:])
    monkeypatch.setattr(planner, "SEARCHED_CHUNKS", 2)
    publish = Plan.publish
    monkeypatch.setattr(Plan, "publish", lambda plan, page: publish(plan, page) if page.page < 2 else _die())
    with pytest.raises(KeyboardInterrupt):
        build(str(tmp_path / "data"), **settings)
    monkeypatch.setattr(Plan, "publish", publish)
    assert texts_in(build(str(tmp_path / "data"), **settings)) == TEXTS


def _die() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("deduplicate", ["none", "exact"])
def test_who_plans_from_spools_that_another_removes_meanwhile_adopts_the_others_plan(
    deduplicate, build, tmp_path, monkeypatch
):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    plans_at_last = planner.tokens_per_byte
    done = []

    def is_overtaken(*arguments):
        if not done:
            done.append("another")
            done.append(build(f"{path}.gz", deduplicate=deduplicate))
            assert not list(done[1].folder.glob("spool/*"))
        return plans_at_last(*arguments)

    monkeypatch.setattr(planner, "tokens_per_byte", is_overtaken)
    cache = build(f"{path}.gz", deduplicate=deduplicate)
    assert cache.snapshot.digest == done[1].snapshot.digest
    assert texts_in(cache) == TEXTS


def test_another_column_of_a_file_is_other_text(build, tmp_path):
    rows = [{"question": f"What is {text}", "answer": text} for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    question, answer = ({"path": str(tmp_path / "a.jsonl"), "text_column": name} for name in rows[0])
    build([question], name="both")
    cache = build([question, answer], name="both")
    assert texts_in(cache) == [row["question"] for row in rows] + [row["answer"] for row in rows]
    assert build([question, answer], name="both").snapshot.digest == cache.snapshot.digest


def test_a_chunk_is_built_again_from_where_a_source_is_now(build, tmp_path):
    (tmp_path / "here").mkdir()
    write_jsonl(tmp_path / "here/a.jsonl", TEXTS)
    before = build(str(tmp_path / "here"), name="moved")
    expected = all_tokens(before)
    shutil.move(tmp_path / "here", tmp_path / "there")
    shutil.rmtree(before.folder / "chunks")
    shutil.rmtree(before.folder / "records")
    shutil.rmtree(before.folder / "index")
    assert np.array_equal(all_tokens(build(str(tmp_path / "there"), name="moved")), expected)


def changed_line(path):
    write_jsonl(path, [TEXTS[0].upper(), *TEXTS[1:50]])


def changed_and_longer(path):
    write_jsonl(path, [TEXTS[0].upper(), *TEXTS[1:80]])


def shorter(path):
    write_jsonl(path, TEXTS[:49])


@pytest.mark.parametrize("change", [changed_line, changed_and_longer, shorter])
def test_a_changed_file_is_refused(change, build, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS[:50])
    before = payloads(build(str(path)))
    change(path)
    with pytest.raises(SourceChangedError, match="has changed since"):
        build(str(path))
    write_jsonl(path, TEXTS[:50])
    assert payloads(build(str(path))) == before


def test_an_appended_parquet_file_is_refused(build, tmp_path):
    build(str(write_parquet(tmp_path / "a.parquet", TEXTS[:50])))
    with pytest.raises(SourceChangedError, match="new files"):
        build(str(write_parquet(tmp_path / "a.parquet", TEXTS)))


def test_a_file_that_changes_between_plan_and_build_is_refused(build, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    cache = build(str(path))
    for name in ("chunks", "records", "index"):
        shutil.rmtree(cache.folder / name)
    changed_line(path)
    with pytest.raises(SourceChangedError, match="has changed since it was planned"):
        build(str(path))
    path.unlink()
    with pytest.raises(SourceError, match=r"a\.jsonl"):
        build(str(path))


def test_another_file_under_the_same_path_is_never_read_from_memory(build, tmp_path):
    path = tmp_path / "a.parquet"
    assert texts_in(build(str(write_parquet(path, TEXTS[:30])), name="one")) == TEXTS[:30]
    assert texts_in(build(str(write_parquet(path, TEXTS[30:60])), name="two")) == TEXTS[30:60]


@pytest.mark.parametrize("fingerprint", [None, "new"])
def test_an_iterable_whose_beginning_changed_is_refused(fingerprint, build):
    build(Longer(TEXTS[:70], fingerprint and "old"))
    for texts in ([*TEXTS[:5], "another", *TEXTS[6:]], TEXTS[:30]):
        with pytest.raises(SourceChangedError, match="may only grow at its end"):
            build(Longer(texts, fingerprint))


def test_an_iterable_that_changed_while_its_builder_was_dead_is_refused(build, monkeypatch):
    """The first part was planned and built; then the builder died, before the fingerprint was recorded as finished."""
    build(Longer(TEXTS[:70], "old"), max_documents=30)
    with pytest.raises(SourceChangedError):
        build(Longer([*TEXTS[:5], "another", *TEXTS[6:]], "new"))


def test_a_cache_of_an_unrelated_source_is_refused(build, tmp_path):
    build(str(write_jsonl(tmp_path / "a.jsonl", TEXTS[:50])), name="mine")
    with pytest.raises(SourceError, match="Set `name`"):
        build(str(write_jsonl(tmp_path / "b.jsonl", TEXTS[50:])), name="mine")


# -- the split


def test_copies_of_a_document_stand_on_the_same_side_wherever_they_are(build):
    cache = build([*TEXTS, *reversed(TEXTS), *TEXTS[:40]], eval_share=0.5)
    ids = documents_in(cache)
    flags = [side for n in range(cache.snapshot.num_chunks) for side in cache.chunk(n).side("document_sides").tolist()]
    assert cache.snapshot.num_chunks > 3
    assert len(set(zip(map(tuple, ids), flags, strict=True))) == len(TEXTS)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3])
def test_the_share_of_evaluation_documents_is_about_what_was_asked_for(share, build):
    cache = build([f"document number {i}" for i in range(4_000)], eval_share=share, sequences_per_chunk=2_000)
    # Four standard deviations of a binomial.
    assert abs(cache.summary.eval_documents - 4_000 * share) <= 4 * np.sqrt(4_000 * share * (1 - share))
    assert (cache.num_sequences("eval") == 0) == (share == 0)


def test_train_and_eval_sequences_never_share_a_document(build):
    cache = build(TEXTS, eval_share=0.3, packing="concat")
    for number in range(cache.snapshot.num_chunks):
        chunk = cache.chunk(number)
        flags = chunk.side("document_sides")
        for row in range(chunk.header.num_sequences):
            assert (flags[chunk.piece_documents(row)] == (row >= chunk.header.num_train)).all()
