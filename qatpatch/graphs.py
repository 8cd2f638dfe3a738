"""Graph modules (``torch.export``, ``torch.fx``): the same patch, node by node.

A live model is rewritten as a module tree; a graph module has only nodes. Its linear calls name their weight, its
SDPA calls
the module they came from, so both can be planned by the same profile. Each becomes a call of a submodule: a
`QATLinear` in the
place of the container that held the weight (the same Parameter objects under the same keys), and a `QATGraphAttention`
without parameters. Swaps, deploy and reports then work as on a live model. `restore` puts the first graph back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from qatpatch import dispatch
from qatpatch.dispatch import AttentionState
from qatpatch.linear import QATLinear
from qatpatch.linear_state import COMPUTE_DTYPES, LinearSettings, LinearState
from qatpatch.reuse import input_group
from qatpatch.switch import Switch
from qatpatch.units import Unit

_ORIGINAL = "_qatpatch_original"
_ATTENTION = "qatpatch_attention"
_LINEARS = (torch.ops.aten.linear.default, nn.functional.linear)
_ATTENTIONS = (torch.ops.aten.scaled_dot_product_attention.default, nn.functional.scaled_dot_product_attention)


class QATGraphAttention(nn.Module):
    """Stands for the SDPA calls of one attention module of a graph: BHSD in and out, no parameters."""

    qatpatch_kind = "QATGraphAttention"

    def __init__(self, scheme: str, switch: Switch) -> None:
        super().__init__()
        self.quantization = AttentionState(scheme, switch, None)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        state = self.quantization
        choice = state.choice
        if choice.mode == "dense":
            return nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        dispatch.refuse_unsupported(dropout_p=dropout_p, is_causal=is_causal, enable_gqa=enable_gqa)
        unmasked = state.switch.unmasked and choice.mode in ("infer", "deployed")
        masked = attn_mask is not None and not unmasked
        scheme, kernel = state.kernel(choice, query.device, query.shape[-1], masked)
        out = dispatch.run_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask,
            scale,
            mode=choice.mode,
            scheme=scheme,
            kernel=kernel,
            unmasked=unmasked,
        )
        return out.transpose(1, 2)


@dataclass
class _Original:
    """What `restore` puts back."""

    graph: torch.fx.Graph
    modules: dict[str, nn.Module] = field(default_factory=dict)
    attentions: list[str] = field(default_factory=list)


def graph_units(model: torch.fx.GraphModule) -> list[Unit]:
    """The linears and attentions of a graph, named by module path, for the planner."""
    units = []
    for path, nodes in linear_nodes(model).items():
        weight, _ = _parameters(model, path, nodes[0])
        problem = None
        if weight.dtype not in COMPUTE_DTYPES:
            problem = f"its weight is {weight.dtype}; NVFP4 training takes float32, bfloat16 or float16"
        units.append(
            Unit(
                name=path,
                paths=(path,),
                kind="linear",
                problem=problem,
                weight=weight,
                width=weight.shape[1],
                device=weight.device,
                note="" if len(nodes) == 1 else f"{len(nodes)} calls",
            )
        )
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    for path, nodes in attention_nodes(model).items():
        note = "" if len(nodes) == 1 else f"{len(nodes)} calls"
        units.append(
            Unit(name=path, paths=(f"{path}.{_ATTENTION}",), kind="attention", problem=None, device=device, note=note)
        )
    return units


def linear_nodes(model: torch.fx.GraphModule) -> dict[str, list[torch.fx.Node]]:
    """Module path -> the nodes that apply its weight as a linear."""
    found: dict[str, list[torch.fx.Node]] = {}
    for node in model.graph.nodes:
        if node.op == "call_module" and isinstance(model.get_submodule(node.target), nn.Linear):
            found.setdefault(node.target, []).append(node)
        elif node.op == "call_function" and node.target in _LINEARS:
            weight = _argument(node, 1, "weight")
            if isinstance(weight, torch.fx.Node) and weight.op == "get_attr" and weight.target.endswith(".weight"):
                found.setdefault(weight.target.removesuffix(".weight"), []).append(node)
    return found


def attention_nodes(model: torch.fx.GraphModule) -> dict[str, list[torch.fx.Node]]:
    """Module path -> its SDPA nodes."""
    found: dict[str, list[torch.fx.Node]] = {}
    for node in model.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if node.op == "call_function" and node.target in _ATTENTIONS and stack:
            path = next(reversed(stack.values()))[0]
            found.setdefault(path.removeprefix("L['self'].").replace("L__self__.", ""), []).append(node)
    return found


def rewrite(
    model: torch.fx.GraphModule, linears: dict[str, LinearSettings], attentions: dict[str, str], switch: Switch
) -> None:
    """Replace the planned nodes by calls of patched submodules; the model is untouched if anything fails.

    Args:
        linears: module path -> settings.
        attentions: module path -> scheme.
    """
    original = _Original(graph=_copied(model.graph))
    nodes_of_linear, nodes_of_attention = linear_nodes(model), attention_nodes(model)
    vars(model)[_ORIGINAL] = original
    try:
        for name, settings in linears.items():
            original.modules[name] = model.get_submodule(name)
            _install_linear(model, name, nodes_of_linear[name][0], LinearState(settings, switch, input_group(name)))
            for node in nodes_of_linear[name]:
                _call_instead(model.graph, node, name, (_argument(node, 0, "input"),), {})
        for name, scheme in attentions.items():
            path = f"{name}.{_ATTENTION}"
            model.add_submodule(path, QATGraphAttention(scheme, switch))
            original.attentions.append(path)
            for node in nodes_of_attention[name]:
                _call_instead(model.graph, node, path, node.args, node.kwargs)
        model.graph.eliminate_dead_code()
        model.graph.lint()
        model.recompile()
    except BaseException:
        restore(model)
        raise


def is_rewritten(model: nn.Module) -> bool:
    """Whether `restore` has something to put back."""
    return _ORIGINAL in vars(model)


def restore(model: torch.fx.GraphModule) -> None:
    """Put back the graph and modules from before `rewrite`."""
    original: _Original = vars(model).pop(_ORIGINAL)
    for path, module in original.modules.items():
        _set(model, path, module)
    for path in original.attentions:
        model.delete_submodule(path)
    model.graph = original.graph


def forget_original(model: torch.fx.GraphModule) -> None:
    """Let go of the first graph and its modules, which hold the dense weights."""
    vars(model).pop(_ORIGINAL, None)


def _copied(graph: torch.fx.Graph) -> torch.fx.Graph:
    copy = torch.fx.Graph()
    output = copy.graph_copy(graph, {})
    copy.output(output)
    copy._codegen = graph._codegen
    return copy


def _install_linear(model: torch.fx.GraphModule, path: str, node: torch.fx.Node, state: LinearState) -> None:
    weight, bias = _parameters(model, path, node)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight, linear.bias = weight, bias
    linear.quantization = state
    linear.__class__ = QATLinear
    _set(model, path, linear)


def _parameters(
    model: torch.fx.GraphModule, path: str, node: torch.fx.Node
) -> tuple[nn.Parameter, nn.Parameter | None]:
    owner = model.get_submodule(path)
    if node.op == "call_module":
        return owner.weight, owner.bias
    bias = _argument(node, 2, "bias")
    return owner.weight, None if bias is None else getattr(owner, "bias", None)


def _call_instead(graph: torch.fx.Graph, node: torch.fx.Node, target: str, args: tuple, kwargs: dict[str, Any]) -> None:
    with graph.inserting_before(node):
        call = graph.call_module(target, args, kwargs)
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    graph.erase_node(node)


def _argument(node: torch.fx.Node, index: int, name: str) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name)


def _set(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, child = path.rpartition(".")
    model.get_submodule(parent)._modules[child] = module
