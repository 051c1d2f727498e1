"Every row of ARCHITECTURES on a tiny random model: masked = removed = reloaded, texts of decoders, wrong rows refused."
import copy
import pytest, torch
transformers = pytest.importorskip('transformers')
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, CONFIG_MAPPING
from allatt_prune import hf, hf_models
from allatt_prune.hf_models import ARCHITECTURES

ROWS = dict(ARCHITECTURES)  # other tests add wrong ones

ATTEND = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, intermediate_size=48)
TEXT = ATTEND | dict(vocab_size=60, max_position_embeddings=40, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
PIXELS = ATTEND | dict(image_size=16, patch_size=4, num_channels=3)
SOUND = ATTEND | dict(conv_dim=[16, 16], conv_stride=[5, 4], conv_kernel=[5, 4], num_feat_extract_layers=2, num_conv_pos_embeddings=4,
                      num_conv_pos_embedding_groups=2, vocab_size=30)
STACKS = dict(vocab_size=60, d_model=32, encoder_layers=3, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
              decoder_ffn_dim=48, max_position_embeddings=40, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
T5 = dict(vocab_size=60, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_decoder_layers=2, num_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
          decoder_start_token_id=1)
GROUPS = dict(num_attention_heads=8)  # two heads share keys and values
EXPERTS = dict(num_experts=4, num_local_experts=4, n_routed_experts=4, moe_num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
               shared_expert_intermediate_size=16, n_group=1, topk_group=1, first_k_dense_replace=1, moe_layer_start_index=1)
LATENT = EXPERTS | dict(qk_nope_head_dim=4, qk_rope_head_dim=4, head_dim=4, v_head_dim=8, q_lora_rank=8, kv_lora_rank=8)
LINEAR = dict(layer_types=['linear_attention', 'full_attention', 'full_attention'], linear_num_key_heads=2, linear_num_value_heads=2,
              linear_key_head_dim=8, linear_value_head_dim=8)
CHANGES = dict(gemma4_text=dict(vocab_size_per_layer_input=60, hidden_size_per_layer_input=8), helium=GROUPS | dict(head_dim=4), nemotron=dict(head_dim=8),
    hunyuan_v1_dense=dict(head_dim=8), hunyuan_v1_moe=dict(head_dim=8) | EXPERTS, ministral=dict(head_dim=8), gptj=dict(rotary_dim=4), codegen=dict(rotary_dim=4),
    gpt_neo=dict(num_layers=3, attention_types=[[['global', 'local', 'local'], 1]]), opt=dict(ffn_dim=48, word_embed_proj_dim=32), ctrl=dict(dff=48),
    xglm=dict(attention_heads=4, d_model=32, ffn_dim=48, num_layers=3), esm=dict(mask_token_id=3), roc_bert=dict(pronunciation_vocab_size=20, shape_vocab_size=20),
    markuplm=dict(max_xpath_tag_unit_embeddings=217, max_depth=4, xpath_unit_hidden_size=4, max_xpath_subs_unit_embeddings=1002), qwen3_5_text=LINEAR,
    lfm2=dict(layer_types=['conv', 'full_attention', 'conv']), deepseek_v2=LATENT, deepseek_v3=LATENT, longformer=dict(attention_window=4),
    albert=dict(embedding_size=16), electra=dict(embedding_size=32), rembert=dict(input_embedding_size=32, output_embedding_size=32),
    videomae=dict(num_frames=4, tubelet_size=2), yolos=dict(image_size=[16, 16]), whisper=dict(num_mel_bins=8, max_source_positions=20, max_target_positions=40))

CHANGES |= dict(gpt_bigcode=dict(num_attention_heads=4), mpt=dict(n_heads=4, n_layers=3, d_model=32, expansion_ratio=2))
for kind in ('qwen2_vl_text', 'qwen2_5_vl_text'): CHANGES[kind] = dict(rope_parameters=dict(rope_type='default', rope_theta=1e4, mrope_section=[1, 1, 2]), head_dim=8)

def rand(*shape): return torch.randn(shape, generator=torch.Generator().manual_seed(0))
IDS = torch.randint(4, 60, (3, 8), generator=torch.Generator().manual_seed(0))
PAD = torch.tensor([[1] * 8, [1] * 6 + [0] * 2, [1] * 4 + [0] * 4])
WORDS = dict(input_ids=IDS * PAD, attention_mask=PAD)

def tiny(kind, **changes): # -> model, batch
    config = CONFIG_MAPPING[kind]
    fields = config().to_dict()
    given, x, auto = TEXT, WORDS, AutoModelForCausalLM if config in AutoModelForCausalLM._model_mapping else AutoModel
    if 'vision_config' in fields: # of images and text
        def part(name, **fields): return fields | dict(model_type=getattr(config(), name).model_type)
        rope = dict(rope_type='default', rope_theta=1e4) | (dict(mrope_section=[1, 1, 2]) if 'qwen' in kind else {})
        given = dict(text_config=part('text_config', **TEXT, head_dim=8, rope_parameters=rope),
                     vision_config=part('vision_config', **PIXELS, depth=1, num_heads=4, embed_dim=32, out_hidden_size=32))
    elif 'encoder_layers' in fields:
        given, x, auto = STACKS, x | dict(decoder_input_ids=IDS[:, :4]), AutoModelForSeq2SeqLM
        if 'num_mel_bins' in fields: x, auto = dict(input_features=rand(2, 8, 40), decoder_input_ids=IDS[:2, :4]), AutoModelForSpeechSeq2Seq
    elif 'num_decoder_layers' in fields: given, x, auto = T5, x | dict(decoder_input_ids=IDS[:, :4]), AutoModelForSeq2SeqLM
    elif 'conv_dim' in fields: given, x = SOUND, dict(input_values=rand(2, 400))
    elif 'patch_size' in fields: given, x = PIXELS, dict(pixel_values=rand(2, 4, 3, 16, 16) if kind == 'videomae' else rand(2, 3, 16, 16))
    elif 'experts' in ' '.join(fields): given = given | EXPERTS
    if fields.get('num_key_value_heads') and given is not T5 and 'head_dim' not in CHANGES.get(kind, {}): given = given | GROUPS
    if fields.get('head_dim'): given = given | dict(head_dim=8)
    torch.manual_seed(0)
    model = auto.from_config(config(**given | CHANGES.get(kind, {}) | changes), attn_implementation='eager').eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not name.endswith('embed_positions.weight'): p.add_(torch.randn_like(p) * .2)  # marian does not save them
    return model, x

def values(model, x): # all outputs in one row
    with torch.no_grad(): return torch.cat([v.flatten() for v in model(**x).to_tuple() if torch.is_tensor(v)])

def blind(model, z, units): # output weights multiplied by z, in place of the mask
    model = copy.deepcopy(model)
    for part in hf_models.units_of(model, units, z.shape[1]):
        w = hf_models.weight_rows(part.modules[-1])
        own = z[part.i, part.span.start:part.span.stop]
        with torch.no_grad(): w.mul_(own.repeat_interleave(w.shape[1] // len(own)))
    return model

ONE = dict(num_attention_heads=4, num_key_value_heads=1) # all heads of a layer share one key
OTHERS = [('t5', dict(feed_forward_proj='gated-gelu')), ('llama', ONE), ('gemma', ONE), ('phi3', ONE), ('gpt_oss', ONE), ('gpt_bigcode', dict(multi_query=False)),
          ('falcon', dict(multi_query=False)), ('falcon', dict(new_decoder_architecture=True, num_attention_heads=8, num_kv_heads=4))]

@pytest.mark.parametrize('kind,changes', [*((kind, {}) for kind in ROWS), *OTHERS])
def test_every_row(kind, changes, tmp_path, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, kind, ROWS[kind])
    if kind not in CONFIG_MAPPING: pytest.skip('of another version of transformers')
    model, x = tiny(kind, **changes)
    row, kinds = ARCHITECTURES[kind], [units for units in ('heads', 'neurons') if getattr(ARCHITECTURES[kind], units)]
    for units in {'heads', 'neurons'} - {*kinds}:
        with pytest.raises(ValueError, match=f'units={units}: not in the row of {kind}'): hf.remove_heads(model, torch.ones(3, 4), units=units)
    units, group = kinds[0] if len(kinds) < 2 else 'both', 0
    if row.neurons: group = hf_models.weight_rows(hf_models.units_of(model, 'neurons', 4)[0].modules[-1]).shape[1] // 4
    z = torch.tensor([[0., 0, 0, 0] * len(kinds), [.5, 0, 1, 2] * len(kinds), [0, 1.5, 0, 1] * len(kinds)])  # the cache counts in the first layer
    if kind == 'albert': z = z[1:2]
    if model.config.is_encoder_decoder: z = torch.cat([z, torch.tensor([[0., 0, 0, 0] * len(kinds), [0, 2, .5, 1] * len(kinds)])]) # of the decoder
    assert hf.shape(model, units, group) == z.shape
    want = values(blind(model, z, units), x)
    effect = (want - values(model, x)).abs().max()
    with hf.masked(model, z, units): masked = values(model, x)
    small = hf.remove_heads(model, z != 0, z, units)
    small.save_pretrained(tmp_path)
    again = type(small).from_pretrained(tmp_path, attn_implementation='eager')
    assert effect > 1e-2 and small.num_parameters() < model.num_parameters()
    assert (masked - want).abs().max() < 1e-4 * effect and (values(small, x) - want).abs().max() < 1e-4 * effect
    assert torch.equal(values(again, x), values(small, x))
    cost = hf.HFHeads(model, None, units, group).costs()  # parameters of a unit, but for biases of what is emptied
    emptied = kind in ('gpt_oss', 'granite_swa') or hf_models.one_key(model.config) # loses what its heads share, too
    assert emptied or model.num_parameters() - small.num_parameters() == ((z == 0) * cost).sum()
    if not isinstance(model, transformers.GenerationMixin): return
    given = {k: v for k, v in x.items() if 'decoder' not in k}
    if not model.config.is_encoder_decoder: given = dict(input_ids=IDS[:, :4], attention_mask=PAD[:, :4].flip(1))
    def text(net): return net.generate(**given, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0, cache_implementation=cache,
                                       return_dict_in_generate=True, output_logits=True)
    for cache in ('dynamic', 'static'):
        with hf.masked(model, z, units): want = text(model)
        found = text(again)
        assert torch.equal(found.sequences, want.sequences)
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(want.logits), atol=1e-3, rtol=1e-3)

def test_labels_are_what_a_decoder_with_an_encoder_reads():
    for kind in ('bart', 'marian', 'whisper'):
        model, x = tiny(kind)
        x.pop('decoder_input_ids')
        for t in (8, 5): # as long as the input, or not
            x['labels'] = IDS[:len(next(iter(x.values()))), :t].flip(1).contiguous()
            assert hf.HFHeads(model, [x]).mean_loss() == pytest.approx(model(**x).loss.item(), rel=1e-4)

def test_a_layer_with_numbers_of_its_own_follows_its_model():
    model, x = tiny('phi3')
    keep = torch.ones(3, 4).bool().index_fill(1, torch.tensor(1), False)
    keep[0] = False
    less = keep & (torch.arange(4) != 3)
    with hf.masked(model, less.float()): want = values(model, x)
    for inplace in (False, True):
        small = hf.remove_heads(hf.remove_heads(model, keep), less, inplace=inplace)
        for net in (small, copy.deepcopy(small)):
            assert (values(net, x) - want).abs().max() < 1e-4
            net.set_attn_implementation('sdpa')
            assert {m.config._attn_implementation for m in net.modules() if hasattr(m, 'config')} == {'sdpa'}
            assert (values(net, x) - want).abs().max() < 1e-4
    assert model.config.num_attention_heads == small.config.num_attention_heads == 8

ATTN = ARCHITECTURES['llama'].heads
WRONG = dict( # kind, row or None, configuration, units
    sharded=('codegen', ('h', 'attn.qkv_proj attn.out_proj', '', 3, 'num_attention_heads embed_dim'), {}, 'heads'),
    one_block=('modernbert', ('layers', 'attn.Wqkv attn.Wo'), {}, 'heads'), no_gate=('llama', ('layers', ATTN, 'mlp.up_proj mlp.down_proj'), {}, 'neurons'),
    norms=('stablelm', None, dict(qk_layernorm=True), 'heads'), wide_norms=('olmo2', ('layers', ATTN), {}, 'heads'), cohere=('cohere', None, dict(use_qk_norm=True), 'heads'),
    sinks=('gpt_oss', ('layers', ATTN), {}, 'heads'), positions=('bloom', ('h', 'self_attention.query_key_value self_attention.dense', '', 1, 'num_heads hidden_size'), {}, 'heads'),
    relative=('deberta-v2', None, dict(relative_attention=True, pos_att_type=['p2c', 'c2p'], share_att_key=False), 'heads'),
    no_hooks=('wavlm', ('encoder.layers', 'attention.q_proj attention.k_proj attention.v_proj attention.out_proj'), {}, 'heads'),
    alibi=('falcon', None, dict(alibi=True), 'heads'), gates=('dinov3_vit', None, dict(use_gated_mlp=True), 'neurons'), missing=('lfm2', ('layers', ATTN.replace('o_proj', 'out_proj')), {}, 'heads'))

@pytest.mark.parametrize('name', WRONG)
def test_wrong_rows_are_refused(name, monkeypatch):
    kind, row, changes, units = WRONG[name]
    model, x = tiny(kind, **changes)
    monkeypatch.setitem(ARCHITECTURES, kind, hf_models.Architecture(*row) if row else ROWS[kind])
    for ask in (lambda: hf.check(model, x, [units]), lambda: hf.remove_heads(model, torch.ones(3, 4), units=units),
                lambda: hf.train_gates(model, x, .25, units, 12, steps=2, loss=lambda net, x: net(**x)[0].square().sum())):
        with pytest.raises(ValueError, match='row right|every layer needs|skip hooks') as e: ask()
        assert chr(10) not in str(e.value)
