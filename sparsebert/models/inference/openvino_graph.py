"""
A base model as a graph of OpenVINO, in which attention under a mask is an operator that runs the backends of this
package.

Letters: B batch, H heads, n tokens, d head size.
"""

import contextlib
import itertools
import logging
import os
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import torch
from openvino import opset15
from openvino.frontend import FrontEndManager
from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder
from openvino.passes import ConstantFolding, Manager
from torch import nn
from transformers.utils import logging as transformers_logging

from ...attention.backends import run_backend
from ...attention.kernels.cpu import in_engine
from ...attention.mask_inputs import MaskInputs
from ...files import GRAPH_FILES, failed_to_write


logger = transformers_logging.get_logger(__name__)

VERSION = openvino.__version__.partition("-")[0]
FILE_NAMES = GRAPH_FILES
GRAPH_NAME = GRAPH_FILES[0]
# What OpenVINO calls the precisions. Linear layers in int8 leave the others to the second best.
_HINTS = {"float32": "f32", "bfloat16": "bf16", "int8": "bf16"}
_NUMBER = "call"  # the graph's input that says which call of it this is
_HEADS_SECOND = [0, 2, 1, 3]


@dataclass
class _Call:
    """What the operators of one call of a graph need, and the error that one of them ended with."""

    mask_inputs: MaskInputs
    error: BaseException | None = None


# OpenVINO runs operators in threads of its own, and hands them tensors alone.
_calls: dict[int, _Call] = {}
_numbers = itertools.count()


class SparseAttentionOperator(openvino.Op):
    """
    Attention of one layer under the mask of the call whose number is the fourth input. Query, key and value have shape
    `(B, n, H, d)`, or `(B, H, n, d)` where `layouts` has an `h` for them; the output has the first.
    """

    def __init__(self, inputs: Any = None, layer: int = 0, scale: float = 1.0, layouts: str = "nnn") -> None:
        self.__dict__.update(layer=layer, scale=scale, layouts=layouts)  # which the next line asks for
        super().__init__(self, *(() if inputs is None else (inputs,)))

    def validate_and_infer_types(self) -> None:
        """The output is like the query, in the layout of the linear layers."""
        shape = self.get_input_partial_shape(0)
        if self.layouts[0] == "h":
            shape = openvino.PartialShape([shape[axis] for axis in _HEADS_SECOND])
        self.set_output_type(0, self.get_input_element_type(0), shape)

    def clone_with_new_inputs(self, new_inputs: Any) -> "SparseAttentionOperator":
        """The same operator elsewhere in a graph."""
        return SparseAttentionOperator(new_inputs, self.layer, self.scale, self.layouts)

    def visit_attributes(self, visitor: Any) -> bool:
        """Write the attributes to a file, or read them."""
        attributes = {"layer": self.layer, "scale": self.scale, "layouts": self.layouts}
        visitor.on_attributes(attributes)
        self.__dict__.update(attributes)
        return True

    def has_evaluate(self) -> bool:
        """Whether there is an `evaluate`."""
        return True

    def evaluate(self, outputs: Any, inputs: Any) -> bool:
        """
        Run the backend on the memory of the engine's tensors. An error waits in the call until the graph has run: the
        engine cannot be left in the middle of it.
        """
        call = _calls[int(inputs[3].data[0])]
        if call.error is None:
            try:
                self._run(outputs, inputs, call)
            except BaseException as error:
                call.error = error
        if call.error is not None:
            outputs[0].data[...] = 0
        return True

    def _run(self, outputs, inputs, call):
        states = [_as_torch(each) for each in inputs[:3]]
        states = [each if at == "h" else each.transpose(1, 2) for each, at in zip(states, self.layouts, strict=True)]
        query, key, value = states
        if key.shape[1] != query.shape[1]:  # several query heads share a key head
            key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
        output = _as_torch(outputs[0])
        with in_engine(output):
            found = run_backend(query, key, value, call.mask_inputs.for_layer(self.layer), self.scale, 0.0)[0]
        if found.data_ptr() != output.data_ptr():
            # NumPy copies on this thread: those of PyTorch would wait busily afterwards.
            np.copyto(outputs[0].data, _as_numpy(found))


def _as_torch(tensor):
    """The memory of a tensor of OpenVINO, which NumPy has no bfloat16 for."""
    viewed = torch.from_numpy(tensor.data)
    return viewed.view(torch.bfloat16) if tensor.get_element_type() == openvino.Type.bf16 else viewed


def _as_numpy(tensor):
    """The memory of a tensor, as that of OpenVINO is seen."""
    return (tensor.view(torch.float16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@cache
def _made_core():
    core = openvino.Core()
    core.add_extension(SparseAttentionOperator)
    return core, os.getpid()


def _core():
    core, process = _made_core()
    if process != os.getpid():  # its threads are not here, and would be waited for
        raise RuntimeError(
            "OpenVINO does not run in a process that was forked from one that used it: use the start method 'spawn'"
        )
    return core


def precisions() -> tuple[str, ...]:
    """The precisions that this CPU computes in and, for int8, NNCF is there for; the exact one first."""
    found = _core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return ("float32", *(["bfloat16"] if "BF16" in found else []), *(["int8"] if find_spec("nncf") else []))


class OpenVinoGraph:
    """
    A graph in a folder, compiled for a number of threads: that of PyTorch when it was read. Several threads may call
    it. It can be pickled.

    Args:
        folder (`Path`): Holds the graph and its weights, as long as it is used.
        precision (`str`): One of [`precisions`].
        owner (`object`, *optional*): Is to live as long as the folder is needed.
        model (`openvino.Model`, *optional*): What the folder holds, if it was read already.
    """

    def __init__(self, folder: Path, precision: str, owner: Any = None, model: Any = None) -> None:
        if precision == "bfloat16" and precision not in precisions():
            logger.warning_once(
                f"{folder} was compiled in bfloat16, which this CPU lacks: it runs in float32, slower."
            )
        self.folder, self.precision, self._owner = folder, precision, owner
        self._model = _core().read_model(folder / GRAPH_NAME) if model is None else model
        self._inputs = {each.any_name for each in self._model.inputs}
        self._threads = torch.get_num_threads()
        self._local = threading.local()
        self._compiled: dict[bool, Any] = {}
        self._compiling = threading.Lock()
        self.recorded: list[dict[str, np.ndarray]] | None = None

    def __reduce__(self) -> tuple:
        return _graph_of_files, (self.files(), self.precision)

    def files(self) -> dict[str, bytes]:
        """The graph as files, by their names. Those of its folder may be of another one by now."""
        saved = _saved(self._model, self.precision)
        return {name: (saved.folder / name).read_bytes() for name in FILE_NAMES}

    @property
    def inputs(self) -> set[str]:
        """Names of the arguments of the base model that the graph takes."""
        return self._inputs - {_NUMBER}

    def _request(self, all_states):
        """The inference request of this thread, for the last hidden states or for those of all layers."""
        core = _core()
        with self._compiling:
            if all_states not in self._compiled:
                hint = _HINTS[self.precision] if "bfloat16" in precisions() else "f32"
                model = self._model.clone()
                if hint == "bf16":
                    _run_operators_in_bfloat16(model)
                if not all_states:
                    model = openvino.Model(model.outputs[:1], model.get_parameters())
                options = {
                    "INFERENCE_PRECISION_HINT": hint,
                    "INFERENCE_NUM_THREADS": self._threads,
                    "PERFORMANCE_HINT": "LATENCY",
                    # Threads that operators start would otherwise inherit a single core.
                    "ENABLE_CPU_PINNING": False,
                }
                self._compiled[all_states] = core.compile_model(model, "CPU", options)
        requests = vars(self._local)
        name = f"request_{all_states}"
        if name not in requests:
            requests[name] = self._compiled[all_states].create_infer_request()
        return requests[name]

    def __call__(
        self, tensors: Mapping[str, torch.Tensor], mask_inputs: MaskInputs | None = None, all_states: bool = False
    ) -> list[torch.Tensor]:
        """
        The last hidden states of the base model for its arguments, and if asked for those of all layers. `mask_inputs`
        are those of the mask that the operators apply.
        """
        arrays = {name: tensors[name].contiguous().numpy() for name in self.inputs}
        request, call, number = self._request(all_states), None, next(_numbers)
        if _NUMBER in self._inputs:
            assert mask_inputs is not None
            arrays[_NUMBER] = np.array([number])
            call = _calls[number] = _Call(mask_inputs)
        try:
            request.infer(arrays, share_inputs=True)
        finally:
            if self.recorded is None:
                _calls.pop(number, None)
        if call is not None and call.error is not None:
            error: BaseException | None = call.error
            while error is not None:
                # Its frames hold memory of the engine, which may be gone when they are collected.
                traceback.clear_frames(error.__traceback__)
                error = error.__context__
            raise call.error
        if self.recorded is not None:
            self.recorded.append(arrays)
        return [torch.from_numpy(output.data.copy()) for output in request.output_tensors]

    def forget_recorded(self) -> None:
        """Stop recording the arguments of the calls, which [`quantized`] reads."""
        for arrays in self.recorded or ():
            _calls.pop(int(arrays.get(_NUMBER, [-1])[0]), None)
        self.recorded = None

    def quantized(self) -> "OpenVinoGraph":
        """The same graph with linear layers in int8, with ranges of activations from the calls that were recorded."""
        logger_class = logging.getLoggerClass()
        import nncf

        logging.setLoggerClass(logger_class)  # which the import replaces, for the loggers of all libraries
        logging.getLogger("nncf").setLevel(logging.ERROR)
        samples: Any = self.recorded
        with contextlib.redirect_stdout(sys.stderr):
            model = nncf.quantize(
                self._model,
                nncf.Dataset(samples),
                model_type=nncf.ModelType.TRANSFORMER,
                preset=nncf.QuantizationPreset.MIXED,
                subset_size=len(samples),
            )
        return _saved(model, "int8")

    def in_precision(self, precision: str) -> "OpenVinoGraph":
        """The same graph, computed in another floating-point precision."""
        return OpenVinoGraph(self.folder, precision, self._owner, self._model)


open_graph = OpenVinoGraph


def _graph_of_files(files, precision):
    owner = tempfile.TemporaryDirectory()
    for name, content in files.items():
        Path(owner.name, name).write_bytes(content)
    return OpenVinoGraph(Path(owner.name), precision, owner)


def _saved(model, precision):
    """A graph of OpenVINO in a temporary folder, from which the system may load it piece by piece."""
    owner = tempfile.TemporaryDirectory()
    try:
        openvino.save_model(model, Path(owner.name, GRAPH_NAME), compress_to_fp16=False)
    except RuntimeError as error:
        if (reason := failed_to_write(error)) is not None:
            raise OSError(f"{owner.name}: {reason}") from error
        raise
    return OpenVinoGraph(Path(owner.name), precision, owner)


def convert(
    module: nn.Module, example: Mapping[str, torch.Tensor], masked_layers: int = 0, windows: bool = False
) -> OpenVinoGraph:
    """
    A module that maps tensors by name to hidden states as a graph in float32, of any batch size and length. If the
    model has a mask, the attention of all its `masked_layers` becomes the operator. `windows`: whether layers of a
    model without a mask have a sliding window.
    """
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # tracing reads every property, and the loss of a base model warns
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of deprecation, which OpenVINO has no other way than, and of constants
            traced = torch.jit.trace(module, tuple(example.values()), strict=False, check_trace=False)
    finally:
        transformers_logging.set_verbosity(verbosity)
    # What `openvino.convert_model` does, but for its telemetry.
    frontend = FrontEndManager().load_by_framework("pytorch")
    decoder = TorchScriptPythonDecoder(traced, example_input=tuple(example.values()))
    model = frontend.convert(frontend.load(decoder))  # which needs the decoder to live
    for parameter, name in zip(model.inputs, example, strict=True):
        parameter.set_names({name})
    folding = Manager()
    folding.register_pass(ConstantFolding())
    folding.run_passes(model)
    if masked_layers:
        _insert_operators(model, masked_layers)
    elif windows:
        _clear_empty_rows(model)
    return _saved(model, "float32")


def _insert_operators(model, num_layers):
    number = opset15.parameter([1], np.int64, name=_NUMBER)
    number.output(0).set_names({_NUMBER})
    nodes = [node for node in model.get_ordered_ops() if node.get_type_name() == "ScaledDotProductAttention"]
    if len(nodes) != num_layers:
        raise ValueError(f"the graph has {len(nodes)} attentions, the model {num_layers}: it cannot be compiled")
    for layer, node in enumerate(nodes):
        # Without the transposes around it, the operator reads what the linear layers write, and the reverse.
        sources = [node.input_value(index) for index in range(3)]
        inner = [_before_transpose(source) for source in sources]
        layouts = "".join("h" if each is None else "n" for each in inner)
        inputs = [source if each is None else each for source, each in zip(sources, inner, strict=True)]
        operator = SparseAttentionOperator([*inputs, number.output(0)], layer, _scale(node), layouts)
        for target in list(node.output(0).get_target_inputs()):
            after = target.get_node()
            if not _transposes_heads(after):
                raise ValueError(f"attention {layer} of the graph is followed by {after.get_type_name()}")
            for place in list(after.output(0).get_target_inputs()):
                place.replace_source_output(operator.output(0))
    model.add_parameters([number])
    model.validate_nodes_and_infer_types()


def _clear_empty_rows(model):
    """
    Have attention return 0 for queries without a key, as in PyTorch. Padding that is farther than the window from all
    tokens has none, and NaN there would spread to the tokens of the next layer.
    """
    for node in model.get_ordered_ops():
        if node.get_type_name() == "ScaledDotProductAttention":
            targets = list(node.output(0).get_target_inputs())
            cleared = opset15.select(opset15.is_nan(node), np.float32(0), node).output(0)
            for place in targets:
                place.replace_source_output(cleared)
    model.validate_nodes_and_infer_types()


def _run_operators_in_bfloat16(model):
    """Spare the operators the conversion to float32 and back, which they would get as parts that OpenVINO lacks."""
    for node in model.get_ordered_ops():
        if node.get_type_name() == SparseAttentionOperator.__name__:
            targets = list(node.output(0).get_target_inputs())
            for place in node.inputs()[:3]:
                place.replace_source_output(opset15.convert(place.get_source_output(), "bf16").output(0))
            converted = opset15.convert(node, "f32").output(0)
            for place in targets:
                place.replace_source_output(converted)
    model.validate_nodes_and_infer_types()


def _scale(node):
    """The factor of the scores in an attention."""
    if node.get_input_size() < 5:
        return node.get_input_partial_shape(0)[3].get_length() ** -0.5
    return float(node.input_value(4).get_node().get_data().item())


def _transposes_heads(node):
    if node.get_type_name() != "Transpose" or node.input_value(1).get_node().get_type_name() != "Constant":
        return False
    return list(node.input_value(1).get_node().get_data()) == _HEADS_SECOND


def _before_transpose(source):
    """What a transpose of heads and tokens reads, or `None` if the source is none."""
    node = source.get_node()
    return node.input_value(0) if _transposes_heads(node) else None
