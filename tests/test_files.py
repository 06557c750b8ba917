"""Names on the command line become the right rows, or an error that names flag, file and line."""

import gzip
import json
import os

import pytest

from common.files import open_sources


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(path)]


def read_rows(paths, flag="--dataset", split="train"):
    sources = open_sources(paths, flag=flag, split=split)
    return [row for source in sources for row in source.read()]


def test_read_rows_formats_agree(tmp_path):
    rows = [{"prompt": "a\u2028b", "n": [1, 2]}, {"prompt": "c", "n": [3]}]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    # what Windows editors write: byte order mark, CRLF, blank lines, no newline at the end
    windows = "\ufeff" + lines.replace("\n", "\r\n\r\n").rstrip()
    (tmp_path / "b.jsonl").write_text(windows, encoding="utf-8", newline="")
    (tmp_path / "c.json").write_text("\ufeff" + json.dumps(rows, indent=1), encoding="utf-8")
    (tmp_path / "d.json").write_text(lines, encoding="utf-8")
    with gzip.open(tmp_path / "e.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(lines)
    with gzip.open(tmp_path / "f.json.gz", "wt", encoding="utf-8") as file:
        json.dump(rows, file)
    for path in sorted(tmp_path.iterdir()):
        assert read_rows([str(path)]) == rows, path
    assert read_rows([str(tmp_path)]) == rows * 6


def test_directory_with_splits_reads_the_asked_one(tmp_path):
    """Training on a directory that also holds the test file must not train on the test rows."""
    write(tmp_path / "toy_train.jsonl", [{"prompt": "a"}])
    write(tmp_path / "toy_test.jsonl", [{"prompt": "b"}])
    (tmp_path / "notes.txt").write_text("not data")
    assert read_rows([str(tmp_path)]) == [{"prompt": "a"}]
    assert read_rows([str(tmp_path)], split="test") == [{"prompt": "b"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", '{"prompt": "a"}\n\n{"prompt": \n', r"--eval_dataset=.*x\.jsonl.* line 3"),
        ("x.json", '[\n{"prompt": "a"},\n{]', r"x\.json.* line 3"),
        ("x.jsonl", '{"prompt": "a"}\n[1]\n', r"x\.jsonl: row 2 is a list"),
        ("x.json", "[1, 2]", "row 1 is a int"),
        ("x.jsonl", "\n \n", "no rows"),
        ("x.json", "[]", "no rows"),
        ("x.jsonl.gz", "not gzip", "cannot be read"),
        ("x.csv", "prompt\na\n", r"expected \.jsonl"),
        (None, "", r"missing\.jsonl: no such file"),
    ],
)
def test_bad_files_name_flag_file_and_place(tmp_path, name, content, message):
    path = tmp_path / (name or "missing.jsonl")
    if name:
        path.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        read_rows([str(path)], flag="--eval_dataset")
    assert str(error.value).startswith(f"--eval_dataset={path}")


def test_missing_file_is_found_before_the_first_is_read(tmp_path):
    (tmp_path / "broken.jsonl").write_text("{")
    with pytest.raises(ValueError, match="no such file"):
        read_rows([str(tmp_path / "broken.jsonl"), str(tmp_path / "missing.parquet")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="the directory has no"):
        read_rows([str(tmp_path / "empty")])


def hub(monkeypatch):
    import datasets

    def load_dataset(name, config, split):
        if name != "org/name":
            raise FileNotFoundError("not on the hub")
        texts = [{"text": f"{config} {split}", "n": [i, None]} for i in range(10)]
        return datasets.Dataset.from_list(texts)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def test_hub_name_config_split_and_slice(monkeypatch):
    hub(monkeypatch)
    rows = read_rows(["org/name"])
    assert len(rows) == 10 and rows[1] == {"text": "None train", "n": [1, None]}
    for name, text in (
        ("org/name:main", "main test"),
        ("org/name:main:dev", "main dev"),
        ("org/name::dev", "None dev"),
    ):
        assert {row["text"] for row in read_rows([name], split="test")} == {text}
    assert [row["n"][0] for row in read_rows(["org/name:main:dev[:2]", "org/name[80%:]"])] == [
        *(0, 1, 8, 9)
    ]
    with pytest.raises(ValueError, match="--dataset=org/nme: no such local file.*not on the hub"):
        read_rows(["org/nme"])
    (one,), (two,) = (open_sources([n], flag="", split="a") for n in ("org/name", "org/name:x"))
    assert one.fingerprint() != two.fingerprint()


@pytest.mark.parametrize(
    ("part", "numbers"),
    [
        ("[:3]", [0, 1, 2]),
        ("[3:5]", [3, 4]),
        ("[-2:]", [9, 10]),
        ("[:-9]", [0, 1]),
        ("[:90%]", range(9)),
        ("[90%:]", [9, 10]),
        ("[-10%:]", [9, 10]),
        ("[:1000]", range(11)),
        ("[:]", range(11)),
    ],
)
def test_slices(tmp_path, part, numbers):
    (path,) = write(tmp_path / "a.jsonl", [{"n": i} for i in range(11)])
    assert [row["n"] for row in read_rows([path + part])] == list(numbers)
    (source,) = open_sources([path + part], flag="--dataset", split="train")
    rows = source.read()
    assert source.name == path + part
    assert source.locate(len(rows) - 1) == f"row {numbers[-1] + 1} of a.jsonl"
    # a folder is one source; its rows are counted over all files, and named by their own
    write(tmp_path / "b.jsonl", [{"n": 0}])
    (source,) = open_sources([f"{tmp_path}[-2:]"], flag="--dataset", split="train")
    assert [row["n"] for row in source.read()] == [10, 0]
    assert (source.locate(0), source.locate(1)) == ("row 11 of a.jsonl", "row 1 of b.jsonl")


@pytest.mark.parametrize("part", ["[3:3]", "[20:]", "[:0]", "[-5:2]", "[100%:]", "[:-11]"])
def test_empty_slices_are_refused(tmp_path, part):
    (path,) = write(tmp_path / "a.jsonl", [{"n": i} for i in range(11)])
    with pytest.raises(ValueError, match="slice is empty, the dataset has 11 rows") as error:
        read_rows([path + part], flag="--eval_dataset")
    assert str(error.value).startswith(f"--eval_dataset={path}{part}: ")


@pytest.mark.parametrize("part", ["[]", "[3]", "[a:b]", "[::2]", "[:101%]", "[1.5:]", "[: 3]", "]"])
def test_malformed_slices_are_refused(tmp_path, part):
    (path,) = write(tmp_path / "a.jsonl", [{"n": 0}])
    with pytest.raises(ValueError, match="expected a slice such as") as error:
        read_rows([path + part])
    assert str(error.value).startswith(f"--dataset={path}{part}: ")


def test_a_path_with_brackets_that_exists_is_that_path(tmp_path):
    (tmp_path / "a[:1]").mkdir()
    write(tmp_path / "a[:1]" / "x.jsonl", [{"n": 0}, {"n": 1}])
    assert len(read_rows([str(tmp_path / "a[:1]")])) == 2
    assert len(read_rows([str(tmp_path / "a[:1]") + "[:1]"])) == 1


def test_one_object_with_the_rows_inside(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"version": 1, "data": [{"n": 0}, {"n": 1}]}, indent=1))
    assert read_rows([str(path)]) == [{"n": 0}, {"n": 1}]
    path.write_text(json.dumps({"messages": [{"role": "user"}]}, indent=1))  # one row
    assert read_rows([str(path)]) == [{"messages": [{"role": "user"}]}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "line 2 is not UTF-8"),
        ("x.json", b'[{"a": "\xff"}]', "not UTF-8"),
        ("x.jsonl", '{"a": 1}'.encode("utf-16"), "line 1 is not UTF-8"),
        ("x.jsonl", bytes(range(256)), "invalid JSON in line 1|not UTF-8"),
        ("x.jsonl", b'{"a": 1}\n' + b"[" * 100_000, "invalid JSON in line 2: maximum recursion"),
        ("x.json", b"[" * 100_000, "invalid JSON: maximum recursion"),
        ("x.jsonl", b'{"a": ' + b"9" * 5000 + b"}", "invalid JSON in line 1: Exceeds the limit"),
        ("x.jsonl", b"7\n", "row 1 is a int, not an object"),
        ("x.json", b'"text"', "holds a str, not a list"),
        ("x.json", b'{"a": 1}\n{"a": }\n', "invalid JSON in line 2"),
        ("x.json", b'{\n"a": }', "invalid JSON in line 2"),
        ("x.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 999)[:40], "cannot be read after line"),
        (
            "x.jsonl.gz",
            gzip.compress(b'{"a": 1}\n')[:11] + b"\xff" * 30,
            "cannot be read after line",
        ),
        ("x.parquet", b"PAR1 and then nothing", "not a readable parquet file"),
        ("x.parquet", b"", "not a readable parquet file"),
        ("x.parquet", b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
        ("x.jsonl", b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
    ],
)
def test_broken_files(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_rows([str(path)])
    assert str(error.value).startswith(f"--dataset={path}: ")


@pytest.mark.parametrize("name", ["", "a\0b.jsonl", "x" * 5000 + ".jsonl", "~nobody/x.jsonl"])
def test_names_that_no_file_can_have(name):
    with pytest.raises(ValueError, match="--dataset="):
        read_rows([name])
    with pytest.raises(ValueError, match="--dataset: no dataset given"):
        read_rows([])


def test_odd_json_that_is_accepted(tmp_path):
    text = '{"a": NaN, "b": 36893488147419103232, "a": 1, "c": "\\ud800\\u0000"}\n'
    (tmp_path / "a.jsonl").write_text(text)
    rows = read_rows([str(tmp_path / "a.jsonl")])
    assert rows == [{"a": 1, "b": 2**65, "c": "\ud800\0"}]  # of two equal keys the last counts


def test_fingerprint_follows_content_name_and_slice(tmp_path):
    def fingerprint(name):
        return open_sources([str(name)], flag="--dataset", split="train")[0].fingerprint()

    path = tmp_path / "a.jsonl"
    write(path, [{"n": 0}])
    first = fingerprint(path)
    assert first == fingerprint(path)
    different = {first, fingerprint(f"{path}[:1]"), fingerprint(f"{path}[:50%]")}
    write(path, [{"n": 1}])
    different.add(fingerprint(path))
    write(tmp_path / "b.jsonl", [{"n": 1}])
    different |= {fingerprint(tmp_path / "b.jsonl"), fingerprint(tmp_path)}
    assert len(different) == 6


def test_folder_never_hands_out_another_split(tmp_path):
    """`validation` of a folder with train and test files was all of them; so was `train_sft`."""
    for name in ("train_sft-0", "train_gen-0", "test_sft-0"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")

    def texts(split):
        return [row["text"] for row in read_rows([str(tmp_path)], split=split)]

    assert texts("train_sft") == ["train_sft-0"]
    assert texts("TRAIN") == ["train_gen-0", "train_sft-0"]
    assert texts("test") == ["test_sft-0"]
    for split in ("validation", "rain", ""):
        with pytest.raises(ValueError, match=f"no file of split '{split}' among .*test_sft"):
            texts(split)
    other = tmp_path / "other"
    other.mkdir()
    (other / "chats.jsonl").write_text('{"text": "a"}\n')  # not named by split
    assert len(read_rows([str(other)], split="test")) == 1


def test_pipes_and_unknown_homes_are_refused(tmp_path):
    """Opening a FIFO hung forever."""
    os.mkfifo(tmp_path / "x.jsonl")
    with pytest.raises(ValueError, match="--dataset="):
        read_rows([str(tmp_path / "x.jsonl")])
    with pytest.raises(ValueError, match="no such file"):
        read_rows(["~nobody-of-that-name/x.jsonl"])
