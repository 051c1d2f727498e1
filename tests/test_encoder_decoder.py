"Encoders with decoders: units of both stacks, in the whole model and in its parts; scores, repairs and healing count the decoder's own tokens."
import copy
import pytest, torch
transformers = pytest.importorskip('transformers')
from torch.nn.functional import pad
from allatt_prune import hf, hf_models
from allatt_prune.gates import HeadGates
from allatt_prune.importance import attention_statistics, keep_mask, score
from allatt_prune.repair import least_squares
from test_architectures import IDS, PAD, WORDS, tiny, values

KINDS = ['bart', 'marian', 't5', 'umt5']
LABELS = IDS[:, :5].masked_fill(torch.arange(5) >= torch.tensor([[5], [3], [4]]), -100)  # of other lengths than the texts
Z = torch.tensor([[1., 0, .5, 1], [0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 2, 1]])  # three layers of the encoder, two of the decoder

def labelled(kind, **changes): # -> model, batch with padding in both texts
    model, x = tiny(kind, **changes)
    return model, dict(WORDS, labels=LABELS)

def units(kind): return 'neurons' if '5' in kind else 'heads'

def part(name, kind): # random weights
    torch.manual_seed(0)
    model = getattr(transformers, name)(tiny(kind)[0].config).eval()
    with torch.no_grad():
        for p in model.parameters(): p.add_(torch.randn_like(p) * .2)
    return model

@pytest.mark.parametrize('name,kind', [('BartForCausalLM', 'bart'), ('MarianForCausalLM', 'marian'), ('MBartForCausalLM', 'mbart'), ('PegasusForCausalLM', 'pegasus'),
                                       ('T5EncoderModel', 't5'), ('UMT5EncoderModel', 'umt5'), ('BartModel', 'bart'), ('MT5Model', 'mt5')])
def test_a_part_is_pruned_alone(name, kind, tmp_path):
    model = part(name, kind)
    z = Z[3:] if 'Causal' in name else Z[:3] if 'Encoder' in name else Z
    x = WORDS if len(z) < 5 else WORDS | dict(decoder_input_ids=IDS[:, :4])
    assert hf.shape(model, units(kind), 12) == z.shape
    hf.check(model, x)
    whole = values(model, x)
    with hf.masked(model, z, units(kind)): want = values(model, x)
    small = hf.remove_heads(model, z != 0, z, units(kind))
    small.save_pretrained(tmp_path)
    again = type(small).from_pretrained(tmp_path)
    assert (want - whole).abs().max() > 1e-2
    for net in (small, again): torch.testing.assert_close(values(net, x), want, rtol=1e-4, atol=1e-4)

@pytest.mark.parametrize('kind,name', [('bart', 'BartForCausalLM'), ('marian', 'MarianForCausalLM'), ('t5', 'T5EncoderModel'), ('umt5', 'UMT5EncoderModel')])
def test_a_part_of_a_pruned_model_opens(kind, name, tmp_path):
    model, x = tiny(kind)
    small = hf.remove_heads(model, Z != 0, Z, units(kind))
    small.save_pretrained(tmp_path)
    net = hf_models.pruned_class(getattr(transformers, name)).from_pretrained(tmp_path, attn_implementation='eager')
    stack = small.get_encoder() if 'Encoder' in name else small.get_decoder()
    own = net.get_encoder() if 'Encoder' in name else net.get_decoder()
    own.load_state_dict(stack.state_dict())                                             # some keep the embeddings elsewhere
    with torch.no_grad(): assert torch.equal(own(**WORDS)[0], stack(**WORDS)[0])
    left = hf.units_left(small, units(kind), 4)
    assert torch.equal(hf.units_left(net, units(kind), 4), left[:3] if 'Encoder' in name else left[3:])
    hf.remove_heads(net, hf.units_left(net, units(kind), 4), units=units(kind)) # and goes on

@pytest.mark.parametrize('kind', KINDS)
def test_padding_of_either_text_changes_nothing(kind):
    model, x = labelled(kind)
    wide = {name: pad(v, (0, 3), value=-100 if name == 'labels' else 0) for name, v in x.items()}
    rows = [{name: v[i:i+1, :n] for name, v in x.items() for n in [(v[i] != -100).sum() if name == 'labels' else PAD[i].sum()]} for i in range(3)]
    methods = ['gradient', 'leave_one_out', 'output_difference', 'taylor'] + ['entropy'] * (units(kind) == 'heads')
    def heads(batches): return hf.HFHeads(model, batches, units(kind), 12)
    for batches in ([wide], rows): # rows: without any padding
        assert heads(batches).mean_loss(Z) == pytest.approx(heads([x]).mean_loss(Z), rel=1e-4)
        for method in methods: torch.testing.assert_close(score(heads(batches), None, method), score(heads([x]), None, method), rtol=2e-3, atol=2e-4)
        a, b = (least_squares(heads(data), Z != 0, None).state_dict() for data in (batches, [x]))
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
    bare = dict(WORDS, decoder_input_ids=IDS[:, :5], decoder_attention_mask=(LABELS != -100).long()) # no labels
    wide = {name: pad(v, (0, 3)) for name, v in bare.items()}
    assert heads([wide]).mean_loss(Z) == pytest.approx(heads([bare]).mean_loss(Z), rel=1e-4)

@pytest.mark.parametrize('kind', KINDS)
def test_losses_are_of_the_decoders_own_tokens(kind):
    model, x = labelled(kind)
    def heads(x): return hf.HFHeads(model, [x], units(kind), 12)
    assert heads(x).mean_loss() == pytest.approx(model(**x).loss.item(), rel=1e-4)
    bare = dict(WORDS, decoder_input_ids=IDS[:, :5])                                    # of which all count
    for real in (None, LABELS != -100):
        y = bare if real is None else bare | dict(decoder_attention_mask=real.long())
        with torch.no_grad():
            a = model(**y).logits
            with hf.masked(model, Z, units(kind)): b = model(**y).logits
        d = (a - b).square().sum(-1) / a.square().sum(-1)
        assert heads(y).mean_loss(Z) == pytest.approx((d if real is None else d[real]).mean().item(), rel=1e-4)

@pytest.mark.parametrize('kind', ['bart', 'marian'])
def test_statistics_are_those_of_both_stacks(kind):
    model, x = labelled(kind)
    found = attention_statistics(model, [x])['entropy']
    maps = model(**x, output_attentions=True)
    lengths = [PAD.sum(1), (LABELS != -100).sum(1)]
    want = []
    for layers, n in zip((maps.encoder_attentions, maps.decoder_attentions), lengths):
        for p in layers:
            rows = [own[:, :k, :k] for own, k in zip(p, n)]
            want.append(sum(-(r * r.clamp(min=1e-30).log()).sum((-1, -2)) for r in rows) / n.sum())
    torch.testing.assert_close(found.float(), torch.stack(want).detach(), rtol=1e-4, atol=1e-5)

@pytest.mark.parametrize('kind', KINDS)
def test_gates_learn_in_both_stacks_and_checkpointing_changes_nothing(kind):
    model, x = labelled(kind)
    model, gates = model.double().train(), HeadGates(5, 4, init=0.).double()
    for m in model.modules():
        if isinstance(m, torch.nn.Dropout): m.p = 0.
        if hasattr(m, 'dropout') and not isinstance(m.dropout, torch.nn.Module): m.dropout = 0.
    def slopes():
        torch.manual_seed(1)
        with hf.masked(model, gates, units(kind)): # several passes, since each leaves some gates quite closed or open
            return torch.autograd.grad(sum(model(**x).loss for _ in range(6)), gates.log_alpha)[0]
    want = slopes()
    assert (want.abs().sum(1) > 0).all()
    model.gradient_checkpointing_enable({'use_reentrant': False})
    torch.testing.assert_close(slopes(), want, rtol=1e-9, atol=1e-12)

@pytest.mark.parametrize('kind', KINDS)
def test_one_call(kind): # to choose, prune and heal
    model, x = labelled(kind)
    gates = hf.train_gates(model, [x], .25, units(kind), 12, steps=8)
    assert gates.open_mask().sum() == 15
    kept = hf.remove_heads(model, gates).config
    assert [len(x) for x in getattr(kept, f'kept_{units(kind)}')] == gates.open_mask().sum(1).tolist()
    with pytest.warns(UserWarning, match='repair'): small = hf.prune(model, [x], .1, progress=False)
    assert sum(small.config.kept_neurons) < 5 * 48 and len(small.config.kept_neurons) == 5
    def lost(net): # Kullback-Leibler divergence from the whole model's predictions, over tokens of labels
        with torch.no_grad(): p, q = (m(**x).logits.log_softmax(-1) for m in (model, net))
        return (p.exp() * (p - q)).sum(-1)[LABELS != -100].mean().item()
    before = lost(small)
    assert lost(hf.heal(small, model, [x], 30, lr=1e-3, progress=False)) < before / 2

@pytest.mark.parametrize('kind', ['bart', 'marian', 'umt5'])
def test_layers_of_both_stacks(kind, tmp_path):
    model, x = tiny(kind)
    keep = torch.tensor([[0], [1], [1], [0], [1]])                                      # the first of each
    with hf.masked(model, keep, 'layers'): want = values(model, x)
    small = hf.remove_heads(model, keep, units='layers')
    small.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation='eager')
    assert type(small) is type(model) and (values(model, x) - want).abs().max() > 1e-2 and hf.shape(again, 'layers') == (3, 1)
    def outs(net): # without the caches of layers, whose number differs
        with torch.no_grad(): out = net(**x)
        return [out.logits, out.encoder_last_hidden_state]
    with hf.masked(model, keep, 'layers'): want = outs(model)
    for net in (small, again): torch.testing.assert_close(outs(net), want, rtol=1e-4, atol=1e-4)
    for cache in ('dynamic', 'static'):
        def text(net): return net.generate(**WORDS, max_new_tokens=4, min_new_tokens=4, do_sample=False, cache_implementation=cache)
        with hf.masked(model, keep, 'layers'): want = text(model)
        assert torch.equal(text(again), want)
    for stack in ([0, 1, 2], [3, 4]):
        none = torch.ones(5, 1)
        none[stack] = 0
        with pytest.raises(ValueError, match='one must stay in each stack'): hf.remove_heads(model, none, units='layers')
    assert hf.prune(model, [dict(WORDS, labels=LABELS)], .2, 'layers', progress=False).num_parameters() < model.num_parameters()

def test_layers_that_share_a_table_of_positions_are_refused(): # the first block holds it
    model, x = tiny('t5')
    with pytest.raises(ValueError, match='t5: layers removed: .*row right'): hf.remove_heads(model, torch.tensor([[0], [1], [1], [1], [1]]), units='layers')
    for ask in (lambda: hf.shape(model), lambda: hf.masked(model, Z).__enter__(), lambda: hf.HFHeads(model, [x]), lambda: hf.remove_heads(model, Z)):
        with pytest.raises(ValueError, match='units=heads: not in the row of t5; see 04_hf_models'): ask()

@pytest.mark.parametrize('changes', [dict(decoder_ffn_dim=96), dict(decoder_ffn_dim=32), dict(decoder_attention_heads=8), dict(decoder_attention_heads=2), dict(decoder_layers=1), dict(encoder_layers=1)])
def test_stacks_that_differ_are_exact_or_refused(changes):
    model, x = tiny('bart', **changes)
    (l, n), generator = hf.shape(model, 'both', 4), torch.Generator().manual_seed(0)
    z = (torch.rand(l, n, generator=generator) > .4) * torch.rand(l, n, generator=generator)
    if changes.get('decoder_attention_heads') == 2: # fewer than in the encoder
        with pytest.raises(ValueError, match='row right') as e: hf.remove_heads(model, z != 0, z, 'both')
        assert '\n' not in str(e.value)
        return
    with hf.masked(model, z, 'both'): want = values(model, x)
    torch.testing.assert_close(values(hf.remove_heads(model, z != 0, z, 'both'), x), want, rtol=1e-4, atol=1e-4)
    singles = hf.HFHeads(model, [dict(WORDS, labels=LABELS)], 'neurons', 1)
    small = least_squares(singles, keep_mask(score(singles, None, 'gradient'), .5), None)
    assert small.num_parameters() < model.num_parameters()
