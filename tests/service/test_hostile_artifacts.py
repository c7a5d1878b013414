"""Artifacts of somebody who means ill, every digest right: refused by name, nothing read, run or set aside for them."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from service.artifact import ARTIFACT_FILE, open_artifact
from service.errors import ArtifactError
from service.placement import choose_placement
from service.session import Session
from tests.service.hostile import describe, seal

ROOT = Path(__file__).parents[2]
NORM = "encoder.embeddings.norm.bias"


@pytest.fixture
def folder(tiny_artifact: Path, tmp_path: Path) -> Path:
    """Give a copy of a whole artifact."""
    return Path(shutil.copytree(tiny_artifact, tmp_path / "artifact"))


def graph_of(folder: Path, name: str = "encode.onnx") -> onnx.ModelProto:
    return onnx.load(folder / name, load_external_data=False)


def put(folder: Path, model: onnx.ModelProto, name: str = "encode.onnx") -> None:
    """Write a graph and seal the artifact."""
    (folder / name).write_bytes(model.SerializeToString())
    seal(folder)


def weight(model: onnx.ModelProto) -> Any:
    return next(tensor for tensor in model.graph.initializer if tensor.name == NORM)


def place(model: onnx.ModelProto, **entries: str) -> None:
    """Say anew where a weight lies."""
    tensor = weight(model)
    found = {entry.key: entry.value for entry in tensor.external_data} | entries
    del tensor.external_data[:]
    for key, value in found.items():
        tensor.external_data.add(key=key, value=value)


def test_what_was_sealed_anew_opens(folder: Path) -> None:
    """An artifact whose graphs were read and written again, digests with them, is as good as before."""

    def vectors() -> np.ndarray:
        session = Session(open_artifact(folder), choose_placement("cpu", "float32"), threads=1)
        session.load()
        session.load("attention")
        (array,) = session.run(session.trial(2, 5)).values()
        return array

    before = vectors()
    for name in ("encode.onnx", "attention.onnx"):
        put(folder, graph_of(folder, name), name)
    np.testing.assert_array_equal(vectors(), before)


# ---------------------------------------------------------------- graphs


def _outside(location: str) -> Callable[[onnx.ModelProto], None]:
    return lambda model: place(model, location=location)


def _twice(model: onnx.ModelProto) -> None:
    weight(model).external_data.add(key="location", value="/etc/passwd")


def _half_external(model: onnx.ModelProto) -> None:
    weight(model).data_location = TensorProto.DEFAULT


def _vast(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(TensorProto(name="vast", dims=[1 << 20, 1 << 20], data_type=TensorProto.FLOAT))


def _negative(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(TensorProto(name="less", dims=[-1], data_type=TensorProto.FLOAT))


def _many_axes(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(TensorProto(name="deep", dims=[1] * 100, data_type=TensorProto.FLOAT))


def _constant_outside(model: onnx.ModelProto) -> None:
    constant = next(node for node in model.graph.node if node.op_type == "Constant")
    constant.attribute[0].t.CopyFrom(weight(model))


def _node(operator: str, domain: str = "", **attributes: Any) -> Callable[[onnx.ModelProto], None]:
    return lambda model: model.graph.node.append(
        helper.make_node(operator, ["input_ids"], ["taken"], domain=domain, **attributes)
    )


def _within_a_branch(model: onnx.ModelProto) -> None:
    branch = next(node for node in model.graph.node if node.op_type == "If")
    branch.attribute[0].g.node.append(helper.make_node("EPContext", [], ["taken"], domain="com.microsoft"))


def _sparse(model: onnx.ModelProto) -> None:
    values = helper.make_tensor("values", TensorProto.FLOAT, [1], [1.0])
    indices = helper.make_tensor("indices", TensorProto.INT64, [1], [0])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [1 << 40]))


def _sparse_constant(model: onnx.ModelProto) -> None:
    _sparse(model)
    model.graph.node.append(helper.make_node("Constant", [], ["taken"]))
    taken = model.graph.node[-1].attribute.add(name="sparse_value", type=onnx.AttributeProto.SPARSE_TENSOR)
    taken.sparse_tensor.CopyFrom(model.graph.sparse_initializer[0])
    del model.graph.sparse_initializer[:]


def _functions(model: onnx.ModelProto) -> None:
    model.functions.append(helper.make_function("", "Gelu", [], [], [], [helper.make_opsetid("", 20)]))


def _domain(model: onnx.ModelProto) -> None:
    model.opset_import.append(helper.make_opsetid("ai.onnx.contrib", 1))


def _nodes(model: onnx.ModelProto) -> None:
    model.graph.node.extend([helper.make_node("Identity", [], [])] * 100_001)


def _another_input(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("more", TensorProto.INT64, ["batch"]))


def _no_output(model: onnx.ModelProto) -> None:
    del model.graph.output[1]


def _wider(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.shape.dim[2].dim_value = 1 << 40


def _of_texts(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.STRING


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_outside("/etc/passwd"), "lies in '/etc/passwd', not in weights.bin"),
        (_outside("../weights.bin"), r"lies in '\.\./weights\.bin'"),
        (_outside("./weights.bin"), r"lies in '\./weights\.bin'"),
        (_outside("tokenizer.json"), r"lies in 'tokenizer\.json'"),
        (_outside("*/_ORT_MEM_ADDR_/*"), "lies in '.*_ORT_MEM_ADDR_"),  # a place in the process's own memory
        (lambda model: place(model, offset=str(1 << 40)), r"ends at byte 1099511627872 of weights\.bin"),
        (lambda model: place(model, offset="-8"), "has not the length of its shape"),
        (lambda model: place(model, length="999999999"), "has not the length of its shape"),
        (_twice, "does not say in one way where it lies"),
        (_half_external, "does not say in one way where it lies"),
        (_vast, "tensor 'vast' declares 1099511627776 numbers"),
        (_negative, "tensor 'less' has a shape that none can have"),
        (_many_axes, "tensor 'deep' has a shape that none can have"),
        (_constant_outside, "a constant of 'Constant' lies in another file"),
        (
            _node("EPContext", "com.microsoft", ep_cache_context="/etc/passwd"),
            r"operator 'com\.microsoft'\.'EPContext'",
        ),
        (_node("PyOp", "ai.onnx.contrib"), r"operator 'ai\.onnx\.contrib'\.'PyOp'"),
        (_node("Loop", body=helper.make_graph([], "body", [], [])), "operator 'Loop' has graphs within"),
        (_node("Map", bodies=[helper.make_graph([], "body", [], [])]), "operator 'Map' has graphs within"),
        (_within_a_branch, r"operator 'com\.microsoft'\.'EPContext'"),
        (_sparse, "has sparse tensors"),
        (_sparse_constant, "has sparse tensors"),
        (_functions, "defines operators of its own"),
        (_domain, r"has operators of 'ai\.onnx\.contrib'"),
        (_nodes, "more than 100000 nodes"),
        (_another_input, "inputs are attention_mask, input_ids, more,"),
        (_no_output, "outputs are"),
        (_wider, r"output last_hidden_state is of type 1 and shape \[None, None, 1099511627776\]"),
        (_of_texts, "input input_ids is of type 8"),
    ],
)
def test_graphs_that_reach_out(folder: Path, change: Callable[[onnx.ModelProto], None], message: str) -> None:
    """A graph that refers to more than the weights file, or declares what is not there, never reaches the runtime."""
    model = graph_of(folder)
    change(model)
    put(folder, model)
    with pytest.raises(ArtifactError, match=rf"encode\.onnx is no graph that an export writes: .*{message}"):
        open_artifact(folder)


def test_a_graph_that_is_none(folder: Path) -> None:
    """Bytes that are no graph are refused before the runtime sees them."""
    (folder / "attention.onnx").write_bytes(b"\xff" * 100)
    seal(folder)
    with pytest.raises(ArtifactError, match=r"attention\.onnx is no ONNX graph"):
        open_artifact(folder)


# ---------------------------------------------------------------- the description


def _weights(**changed: object) -> Callable[[Path], None]:
    """Say something else of one weight of the first layer."""

    def change(folder: Path) -> None:
        places = json.loads((folder / ARTIFACT_FILE).read_text("utf-8"))["attention_weights"]
        next(iter(places[0].values())).update(changed)
        describe(folder, attention_weights=places)

    return change


def _names(name: str) -> Callable[[Path], None]:
    """Name another file, with whatever digest."""

    def change(folder: Path) -> None:
        files = json.loads((folder / ARTIFACT_FILE).read_text("utf-8"))["files"]
        describe(folder, files=files | {name: files["encode.onnx"]})

    return change


def _text(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / ARTIFACT_FILE).write_text(text, "utf-8")


def _gigabytes(folder: Path) -> None:
    os.truncate(folder / ARTIFACT_FILE, 8 << 30)  # takes no room on the disk


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: describe(folder, vocab_size=1 << 31), "values for vocab_size that do not fit the"),
        (lambda folder: describe(folder, hidden_size=1 << 31), "values for hidden_size, attention_weights that do not"),
        (lambda folder: describe(folder, sentence_size=1 << 31), "values for sentence_size that do not fit"),
        (lambda folder: describe(folder, type_vocab_size=1 << 62), "values for type_vocab_size that do not fit"),
        (lambda folder: describe(folder, num_attention_heads=1 << 31), "values for num_attention_heads, attention_w"),
        (lambda folder: describe(folder, num_attention_heads=4), "values for attention_weights that do not fit"),
        (lambda folder: describe(folder, num_hidden_layers=1 << 40), "no export writes for attention_weights"),
        (lambda folder: describe(folder, max_tokens=1 << 21), "no export writes for max_tokens"),
        (_weights(offset=1 << 40), "values for attention_weights that do not fit"),
        (_weights(offset=2), "no export writes for attention_weights"),
        (_weights(shape=[1 << 31, 1 << 31]), "no export writes for attention_weights"),
        (_weights(shape=[1] * 1000), "no export writes for attention_weights"),
        (lambda folder: describe(folder, inputs=[["input_ids"]]), "no export writes for inputs"),
        (lambda folder: describe(folder, poolings=["mean", "evil"]), "no export writes for poolings"),
        (lambda folder: describe(folder, model_id="m" * 1001), "no export writes for model_id"),
        (lambda folder: describe(folder, prompts={"query": "\ud800"}), "no export writes for prompts"),
        (_names("../../etc/passwd"), r"names '\.\./\.\./etc/passwd', which is no file of an artifact"),
        (_names("/etc/passwd"), "names '/etc/passwd', which is no file of an artifact"),
        (_names("\0"), "which is no file of an artifact"),
        (_text("[" * 100_000), "cannot be read: .*recursion"),
        (_text('{"files": {}, "files": {"a": 1}}'), "has a key twice"),
        (_text('{"format_version": NaN}'), "NaN is no JSON"),
        (_gigabytes, "is larger than the 4194304 bytes"),
    ],
)
def test_descriptions_that_say_too_much(folder: Path, change: Callable[[Path], object], message: str) -> None:
    """A number for which the files are too small, and JSON that costs or means two things, are refused by name."""
    change(folder)
    with pytest.raises(ArtifactError, match=message):
        open_artifact(folder)


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("name", [ARTIFACT_FILE, "encode.onnx", "tokenizer.json", "weights.bin"])
@pytest.mark.parametrize("kind", ["outside", "loop", "pipe", "device", "folder"])
def test_files_that_are_none_of_the_folders(folder: Path, tmp_path: Path, name: str, kind: str) -> None:
    """Links that lead out, pipes, devices and folders are refused, and nothing waits for them."""
    path, real = folder / name, tmp_path / "elsewhere"
    path.rename(real)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"outside": real, "loop": path, "device": Path("/dev/zero")}[kind])
    refused = "is a link to .* outside of its folder|cannot be read|is not a plain file"
    with pytest.raises(ArtifactError, match=f"{name} ({refused})|has no {name}"):
        open_artifact(folder)


def test_links_within_the_folder(folder: Path, tmp_path: Path) -> None:
    """A volume of Kubernetes, whose names are links to a folder within it, opens like a plain folder, by a link too."""
    (folder / "..2026").mkdir()
    (folder / "..data").symlink_to("..2026")
    for path in [path for path in folder.iterdir() if path.is_file()]:
        path.rename(folder / "..2026" / path.name)
        path.symlink_to(f"..data/{path.name}")
    (tmp_path / "link").symlink_to(folder)
    assert open_artifact(tmp_path / "link").digest == open_artifact(folder).digest


# ---------------------------------------------------------------- the whole


OPEN_ALL = """
import sys
from pathlib import Path
from service.artifact import open_artifact
from service.errors import ArtifactError
from service.tokenization import TextTokenizer
for name in sys.argv[1:]:
    try:
        TextTokenizer(open_artifact(Path(name)))
    except ArtifactError as error:
        print(error)
"""


def test_bombs_within_a_gigabyte(folder: Path, tmp_path: Path) -> None:
    """What declares or unfolds to many gigabytes is refused by a process that may have one."""
    nodes, table, vast, long = (shutil.copytree(folder, tmp_path / name) for name in ("nodes", "table", "vast", "long"))
    model = (nodes / "encode.onnx").read_bytes()
    empty = b"\x0a\x00" * ((7 << 20) // 2)  # seven million bytes of nodes that say nothing
    size = len(empty)
    length = bytes([size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14 & 0x7F | 0x80, size >> 21])
    (nodes / "encode.onnx").write_bytes(model + b"\x3a" + length + empty)  # readers join both parts of the graph
    bomb = {"type": "Precompiled", "precompiled_charsmap": "////////"}  # declares 4 GiB of numbers
    raw = json.loads((table / "tokenizer.json").read_text("utf-8")) | {"normalizer": bomb}
    (table / "tokenizer.json").write_text(json.dumps(raw), "utf-8")
    for place_ in (nodes, table):
        seal(place_)
    describe(vast, hidden_size=1 << 60, vocab_size=1 << 60)
    _gigabytes(long)
    opened = (nodes, table, vast, long)
    printed = subprocess.run(
        ["sh", "-c", 'ulimit -v 1048576; exec "$@"', "sh", sys.executable, "-c", OPEN_ALL, *map(str, opened)],
        cwd=ROOT,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout.splitlines()
    assert [line.split()[0].split("/")[-2] for line in printed] == ["nodes", "table", "vast", "long"]


def test_the_command_says_what_is_wrong(folder: Path) -> None:
    """`attencode serve` of such an artifact ends at once with one line that names file and fault."""
    model = graph_of(folder)
    place(model, location="/etc/passwd")
    put(folder, model)
    ended = subprocess.run(
        [sys.executable, "-m", "service", "serve", str(folder), "--port", "0", "--metrics-port", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode != 0
    assert "encode.onnx is no graph that an export writes" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
