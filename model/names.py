"""Names: how each family's checkpoints call the tensors that are ours. Data, not code.

A table maps the checkpoint's names to ours; `{n}` stands for a layer number, `{p}` for weight or bias.
May import: nothing.
"""

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
