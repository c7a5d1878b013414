"""Names: how each family's checkpoints call the tensors that are ours. Data, not code.

A table maps the checkpoint's names to ours; `{n}` stands for a layer number, `{m}` for one within a group of layers,
`{p}` for weight or bias. One tensor that holds several of ours, in equal parts along its first axis, has their names
in order. May import: nothing.
"""

from collections.abc import Mapping

Names = Mapping[str, str | tuple[str, ...]]

_BERT_ATTENTION = {
    "encoder.layer.{n}.attention.self.query.{p}": "layers.{n}.attention.query.{p}",
    "encoder.layer.{n}.attention.self.key.{p}": "layers.{n}.attention.key.{p}",
    "encoder.layer.{n}.attention.self.value.{p}": "layers.{n}.attention.value.{p}",
    "encoder.layer.{n}.attention.output.dense.{p}": "layers.{n}.attention.output.{p}",
    "encoder.layer.{n}.attention.output.LayerNorm.{p}": "layers.{n}.attention_norm.{p}",
}
_BERT_FEED_FORWARD = {
    "encoder.layer.{n}.intermediate.dense.{p}": "layers.{n}.feed_forward.intermediate.{p}",
    "encoder.layer.{n}.output.dense.{p}": "layers.{n}.feed_forward.output.{p}",
    "encoder.layer.{n}.output.LayerNorm.{p}": "layers.{n}.feed_forward_norm.{p}",
}
_EMBEDDINGS = {
    "embeddings.word_embeddings.weight": "embeddings.token.weight",
    "embeddings.position_embeddings.weight": "embeddings.position.weight",
    "embeddings.LayerNorm.{p}": "embeddings.norm.{p}",
}
_SEGMENTS = {"embeddings.token_type_embeddings.weight": "embeddings.segment.weight"}
BERT = {**_EMBEDDINGS, **_SEGMENTS, **_BERT_ATTENTION, **_BERT_FEED_FORWARD}
DISTILBERT = {
    **_EMBEDDINGS,
    "transformer.layer.{n}.attention.q_lin.{p}": "layers.{n}.attention.query.{p}",
    "transformer.layer.{n}.attention.k_lin.{p}": "layers.{n}.attention.key.{p}",
    "transformer.layer.{n}.attention.v_lin.{p}": "layers.{n}.attention.value.{p}",
    "transformer.layer.{n}.attention.out_lin.{p}": "layers.{n}.attention.output.{p}",
    "transformer.layer.{n}.sa_layer_norm.{p}": "layers.{n}.attention_norm.{p}",
    "transformer.layer.{n}.ffn.lin1.{p}": "layers.{n}.feed_forward.intermediate.{p}",
    "transformer.layer.{n}.ffn.lin2.{p}": "layers.{n}.feed_forward.output.{p}",
    "transformer.layer.{n}.output_layer_norm.{p}": "layers.{n}.feed_forward_norm.{p}",
}
MPNET = {
    **_EMBEDDINGS,
    **_BERT_FEED_FORWARD,
    "encoder.layer.{n}.attention.attn.q.{p}": "layers.{n}.attention.query.{p}",
    "encoder.layer.{n}.attention.attn.k.{p}": "layers.{n}.attention.key.{p}",
    "encoder.layer.{n}.attention.attn.v.{p}": "layers.{n}.attention.value.{p}",
    "encoder.layer.{n}.attention.attn.o.{p}": "layers.{n}.attention.output.{p}",
    "encoder.layer.{n}.attention.LayerNorm.{p}": "layers.{n}.attention_norm.{p}",
    "encoder.relative_attention_bias.weight": "position_bias.bias.weight",
}
DEBERTA = {
    **_EMBEDDINGS,
    **_SEGMENTS,
    **_BERT_FEED_FORWARD,
    "embeddings.embed_proj.weight": "embeddings.projection.weight",
    "encoder.layer.{n}.attention.self.query_proj.{p}": "layers.{n}.attention.query.{p}",
    "encoder.layer.{n}.attention.self.key_proj.{p}": "layers.{n}.attention.key.{p}",
    "encoder.layer.{n}.attention.self.value_proj.{p}": "layers.{n}.attention.value.{p}",
    "encoder.layer.{n}.attention.self.pos_key_proj.{p}": "layers.{n}.attention.position_key.{p}",
    "encoder.layer.{n}.attention.self.pos_query_proj.{p}": "layers.{n}.attention.position_query.{p}",
    "encoder.layer.{n}.attention.output.dense.{p}": "layers.{n}.attention.output.{p}",
    "encoder.layer.{n}.attention.output.LayerNorm.{p}": "layers.{n}.attention_norm.{p}",
    "encoder.rel_embeddings.weight": "relative.table.weight",
    "encoder.LayerNorm.{p}": "relative.norm.{p}",
    "encoder.conv.conv.{p}": "layers.0.convolution.conv.{p}",
    "encoder.conv.LayerNorm.{p}": "layers.0.convolution.norm.{p}",
}
T5 = {
    "shared.weight": "embeddings.token.weight",
    "encoder.embed_tokens.weight": "embeddings.token.weight",
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": "position_bias.bias.weight",
    "encoder.block.{n}.layer.0.SelfAttention.q.weight": "layers.{n}.attention.query.weight",
    "encoder.block.{n}.layer.0.SelfAttention.k.weight": "layers.{n}.attention.key.weight",
    "encoder.block.{n}.layer.0.SelfAttention.v.weight": "layers.{n}.attention.value.weight",
    "encoder.block.{n}.layer.0.SelfAttention.o.weight": "layers.{n}.attention.output.weight",
    "encoder.block.{n}.layer.0.layer_norm.weight": "layers.{n}.attention_norm.weight",
    "encoder.block.{n}.layer.1.DenseReluDense.wi.weight": "layers.{n}.feed_forward.intermediate.weight",
    "encoder.block.{n}.layer.1.DenseReluDense.wi_0.weight": "layers.{n}.feed_forward.intermediate.weight",
    "encoder.block.{n}.layer.1.DenseReluDense.wi_1.weight": "layers.{n}.feed_forward.gate.weight",
    "encoder.block.{n}.layer.1.DenseReluDense.wo.weight": "layers.{n}.feed_forward.output.weight",
    "encoder.block.{n}.layer.1.layer_norm.weight": "layers.{n}.feed_forward_norm.weight",
    "encoder.final_layer_norm.weight": "final_norm.weight",
}
ALBERT = {
    **_EMBEDDINGS,
    **_SEGMENTS,
    "encoder.embedding_hidden_mapping_in.{p}": "embeddings.projection.{p}",
    **{
        f"encoder.albert_layer_groups.{{n}}.albert_layers.{{m}}.{theirs}.{{p}}": f"layers.{{n}}.{{m}}.{ours}.{{p}}"
        for theirs, ours in {
            "attention.query": "attention.query",
            "attention.key": "attention.key",
            "attention.value": "attention.value",
            "attention.dense": "attention.output",
            "attention.LayerNorm": "attention_norm",
            "ffn": "feed_forward.intermediate",
            "ffn_output": "feed_forward.output",
            "full_layer_layer_norm": "feed_forward_norm",
        }.items()
    },
}
_QUERY_KEY_VALUE = (
    "layers.{n}.attention.query.{p}",
    "layers.{n}.attention.key.{p}",
    "layers.{n}.attention.value.{p}",
)
MODERNBERT: Names = {
    "embeddings.tok_embeddings.weight": "embeddings.token.weight",
    "embeddings.norm.{p}": "embeddings.norm.{p}",
    "layers.{n}.attn_norm.{p}": "layers.{n}.attention_norm.{p}",
    "layers.{n}.attn.Wqkv.{p}": _QUERY_KEY_VALUE,
    "layers.{n}.attn.Wo.{p}": "layers.{n}.attention.output.{p}",
    "layers.{n}.mlp_norm.{p}": "layers.{n}.feed_forward_norm.{p}",
    "layers.{n}.mlp.Wi.{p}": ("layers.{n}.feed_forward.intermediate.{p}", "layers.{n}.feed_forward.gate.{p}"),
    "layers.{n}.mlp.Wo.{p}": "layers.{n}.feed_forward.output.{p}",
    "final_norm.{p}": "final_norm.{p}",
}
NOMIC_BERT: Names = {
    "embeddings.word_embeddings.weight": "embeddings.token.weight",
    **_SEGMENTS,
    "emb_ln.{p}": "embeddings.norm.{p}",
    "encoder.layers.{n}.attn.Wqkv.{p}": _QUERY_KEY_VALUE,
    "encoder.layers.{n}.attn.out_proj.{p}": "layers.{n}.attention.output.{p}",
    "encoder.layers.{n}.norm1.{p}": "layers.{n}.attention_norm.{p}",
    "encoder.layers.{n}.mlp.fc11.{p}": "layers.{n}.feed_forward.gate.{p}",
    "encoder.layers.{n}.mlp.fc12.{p}": "layers.{n}.feed_forward.intermediate.{p}",
    "encoder.layers.{n}.mlp.fc2.{p}": "layers.{n}.feed_forward.output.{p}",
    "encoder.layers.{n}.norm2.{p}": "layers.{n}.feed_forward_norm.{p}",
}
GTE: Names = {
    "embeddings.word_embeddings.weight": "embeddings.token.weight",
    **_SEGMENTS,
    "embeddings.LayerNorm.{p}": "embeddings.norm.{p}",
    "encoder.layer.{n}.attention.qkv_proj.{p}": _QUERY_KEY_VALUE,
    "encoder.layer.{n}.attention.q_proj.{p}": "layers.{n}.attention.query.{p}",
    "encoder.layer.{n}.attention.k_proj.{p}": "layers.{n}.attention.key.{p}",
    "encoder.layer.{n}.attention.v_proj.{p}": "layers.{n}.attention.value.{p}",
    "encoder.layer.{n}.attention.o_proj.{p}": "layers.{n}.attention.output.{p}",
    "encoder.layer.{n}.attn_ln.{p}": "layers.{n}.attention_norm.{p}",
    "encoder.layer.{n}.mlp.up_gate_proj.weight": (
        "layers.{n}.feed_forward.gate.weight",
        "layers.{n}.feed_forward.intermediate.weight",
    ),
    "encoder.layer.{n}.mlp.down_proj.{p}": "layers.{n}.feed_forward.output.{p}",
    "encoder.layer.{n}.mlp_ln.{p}": "layers.{n}.feed_forward_norm.{p}",
}
