"""DeepSeek V2 and V3: latent attention, shared and routed experts. Layers that predict further tokens are left out."""

from __future__ import annotations

from anyckpt.names.arch import rows
from anyckpt.names.arch.rows import BLOCK, LAYER, row
from anyckpt.names.arch.table import Architecture, Rule
from anyckpt.names.ops import KV_B

SHARED = (("gate_proj", "ffn_gate_shexp"), ("up_proj", "ffn_up_shexp"), ("down_proj", "ffn_down_shexp"))
ARCHITECTURE = Architecture(
    "deepseek2", ("deepseek_v2", "deepseek_v3"), ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
    gguf=(
        *rows.ends(), *rows.NORMS, *rows.MLP,
        row("self_attn.q_proj.weight", "attn_q.weight", optional=True),
        row("self_attn.q_a_proj.weight", "attn_q_a.weight", optional=True),
        row("self_attn.q_a_layernorm.weight", "attn_q_a_norm.weight", optional=True),
        row("self_attn.q_b_proj.weight", "attn_q_b.weight", optional=True),
        row("self_attn.kv_a_proj_with_mqa.weight", "attn_kv_a_mqa.weight"),
        row("self_attn.kv_a_layernorm.weight", "attn_kv_a_norm.weight"),
        Rule(
            (LAYER + "self_attn.kv_b_proj.weight",), BLOCK + "attn_k_b.weight", also=(BLOCK + "attn_v_b.weight",),
            parting=KV_B,
        ),
        row("self_attn.o_proj.weight", "attn_output.weight"),
        row("mlp.gate.weight", "ffn_gate_inp.weight"),
        row("mlp.gate.e_score_correction_bias", "exp_probs_b.bias", optional=True),
        *(row(f"mlp.shared_experts.{hf}.weight", f"{gguf}.weight") for hf, gguf in SHARED),
        *rows.QWEN_EXPERTS,
    ),
    ignored=rows.BUFFERS,
)  # fmt: skip
