"Single neurons, whole layers, repair, `prune` and `heal` of Hugging Face models."
import copy, re, subprocess, sys
import pytest, torch
transformers = pytest.importorskip('transformers')
from torch.nn.functional import pad
from allatt_prune import hf, hf_models, importance, progress, repair, timing
from allatt_prune.importance import keep_mask, score
from allatt_prune.repair import least_squares
from test_hf import BATCH, DECODERS, IDS, KINDS, PAD, each_loss, for_scores, hidden, made, plain_loop

def random_mask(l, n, keep=.7, seed=5): return torch.rand(l, n, generator=torch.Generator().manual_seed(seed)) < keep

def width(model): return hf_models.units_of(model, 'neurons', 0)[0].modules[-1]

@pytest.mark.parametrize('kind', KINDS)
def test_single_neurons_masked_removed_reloaded_and_pruned_again(kind, tmp_path):
    model = made(kind, dtype=torch.float64)
    l, n = hf.shape(model, 'neurons', 1)
    keep = random_mask(l, n)
    keep[1] = False # an empty layer
    z = keep * torch.rand(l, n, generator=torch.Generator().manual_seed(6), dtype=torch.float64).add(.5)
    with hf.masked(model, z, 'neurons'): want = hidden(model)
    small = hf.remove_heads(model, keep, z, 'neurons')
    assert (hidden(small) - want).abs().max() < 1e-10 and (want - hidden(model)).abs().max() > 1e-3
    left = [int(x.sum()) for x in keep]
    assert [len(hf_models.listed(x)) for x in small.config.kept_neurons] == left # counted, not listed
    assert small.config.kept_neurons[0] == left[0]
    small.save_pretrained(tmp_path)
    assert f'{left} of {n} neurons' in (tmp_path/'README.md').read_text()
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert torch.equal(hidden(again), hidden(small))
    assert hf.units_left(again, 'neurons', n).sum(1).tolist() == left # numbered from 0
    less = hf.units_left(again, 'neurons', n)
    less[0, 3] = less[2, 0] = False
    with hf.masked(again, less.double(), 'neurons'): want = hidden(again)
    smaller = hf.remove_heads(again, less, units='neurons')
    assert (hidden(smaller) - want).abs().max() < 1e-10
    assert smaller.config.kept_neurons[0] == left[0] - 1
    both = hf.remove_heads(smaller, torch.tensor([[1, 0, 1, 1]] * 3)) # heads after neurons
    assert both.config.kept_heads[0] == [0, 2, 3] and both.config.kept_neurons[0] == left[0] - 1

def test_a_multiple_keeps_the_best_of_each_layer():
    scores = torch.rand(3, 24, generator=torch.Generator().manual_seed(0))
    keep = keep_mask(scores, .25, multiple=4)
    assert keep.sum() == 56 and (keep.sum(1) % 4 == 0).all() and len({*keep.sum(1).tolist()}) > 1
    for x, stays in zip(scores, keep): assert x[stays].min() > x[~stays].max() if stays.any() and not stays.all() else True
    runs = sorted((float(x[4*i:4*i + 4].mean()) for x in scores.sort(dim=1, descending=True).values for i in range(6)), reverse=True)
    means = [float(x.mean()) for s, stays in zip(scores, keep) if not stays.all() for x in [s[~stays].topk(4).values]]
    assert max(means) < runs[13] # 14 runs of 18 stay, none that was removed is better
    assert torch.equal(keep, keep_mask(scores, .25, multiple=4, costs=torch.full((24,), 7.)))
    assert torch.equal(keep_mask(scores, .25), keep_mask(scores, .25, multiple=1))
    with pytest.raises(ValueError, match='multiple=5: does not divide 24'): keep_mask(scores, .25, multiple=5)

@pytest.mark.parametrize('kind', ['bert', 'gpt2', 'llama'])
def test_sorting_changes_nothing_and_groups_of_sorted_neurons_are_the_multiple(kind):
    model = made(kind, dtype=torch.float64)
    l, n = hf.shape(model, 'neurons', 1)
    scores = torch.rand(l, n, generator=torch.Generator().manual_seed(1))
    ordered, m = copy.deepcopy(model), 8
    for x, s in zip(hf_models.units_of(ordered, 'neurons', n), scores):
        order = s.argsort(descending=True, stable=True)
        *inputs, out = x.modules
        with torch.no_grad():
            for f in inputs:
                hf.weight_rows(f).copy_(hf.weight_rows(f)[order].clone())
                if f.bias is not None: f.bias.copy_(f.bias[order].clone())
            hf.weight_rows(out).copy_(hf.weight_rows(out)[:, order].clone())
    assert (hidden(ordered) - hidden(model)).abs().max() < 1e-10
    keep = keep_mask(scores, .25, multiple=m)
    groups = keep.sum(1, keepdim=True) > torch.arange(0, n, m) # the first of each layer
    small, same = hf.remove_heads(model, keep, units='neurons'), hf.remove_heads(ordered, groups, units='neurons')
    assert (hidden(small) - hidden(same)).abs().max() < 1e-10
    assert small.num_parameters() == same.num_parameters() < model.num_parameters()

@pytest.mark.parametrize('kind', KINDS)
def test_layers_masked_removed_and_reloaded(kind, tmp_path):
    for dtype, eps in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        model = made(kind, dtype=dtype)
        whole = hidden(model)
        for stay in ([1, 0, 1], [0, 1, 1], [1, 1, 0], [0, 1, 0], [1, 1, 1]):
            keep = torch.tensor(stay)[:, None]
            with hf.masked(model, keep.float(), 'layers'): want = hidden(model)
            small = hf.remove_heads(model, keep, units='layers')
            assert (hidden(small) - want).abs().max() < eps
            assert torch.equal(hidden(model), whole) and torch.equal(want, whole) == all(stay)
            assert type(small) is type(model) and small.config.num_hidden_layers == sum(stay) == len(hf.layers(small))
        small.save_pretrained(tmp_path/str(dtype))
    small = hf.remove_heads(hf.remove_heads(model, torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0]])), torch.tensor([[1], [0], [1]]), units='layers')
    assert small.config.kept_heads == [[0], [1, 2]] # lists follow
    small.save_pretrained(tmp_path/'both')
    again = type(small).from_pretrained(tmp_path/'both', dtype=torch.float64).eval()
    assert torch.equal(hidden(again), hidden(small))

@pytest.mark.parametrize('kind', DECODERS)
def test_fewer_layers_write_with_any_cache(kind):
    model = made(kind, task='CausalLM')
    small = hf.remove_heads(model, torch.tensor([[0], [1], [1]]), units='layers')
    def text(net, cache): return net.generate(input_ids=IDS[:, :4], attention_mask=torch.ones(3, 4).long(), max_new_tokens=12, min_new_tokens=12,
                                              do_sample=False, pad_token_id=0, cache_implementation=cache)
    with torch.no_grad():
        ids = IDS[:, :4]
        for _ in range(12): ids = torch.cat([ids, small(ids).logits[:, -1].argmax(-1)[:, None]], 1) # without a cache
    texts = [text(small, cache) for cache in ('dynamic', 'static')]
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], ids)

READER = '''
import sys, torch, transformers
sys.modules['allatt_prune'] = None # cannot be imported
for name, trust in (('layers', False), ('neurons', True)):
    folder = sys.argv[1] + '/' + name
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust)
    assert torch.equal(model.eval()(torch.load(folder + '/ids')).logits, torch.load(folder + '/logits')), name
'''

def test_saved_folders_open_without_this_package(tmp_path):
    model, batches = for_scores('llama', intermediate_size=64)
    l, n = hf.shape(model, 'neurons', 1)
    masks = dict(layers=(torch.tensor([[1], [0], [1]]), 'layers'), neurons=(keep_mask(torch.rand(l, n), .3, multiple=16), 'neurons'))
    for name, (keep, units) in masks.items():
        small = hf.remove_heads(model, keep, units=units)
        if units == 'neurons': assert all(width % 16 == 0 for width in small.config.kept_neurons)
        small.save_pretrained(tmp_path/name)
        torch.save(IDS, tmp_path/name/'ids')
        with torch.no_grad(): torch.save(small(IDS).logits, tmp_path/name/'logits')
    assert not (tmp_path/'layers'/'modeling_allatt_prune.py').exists()
    found = subprocess.run([sys.executable, '-c', READER, tmp_path], capture_output=True, text=True, env={'HF_HOME': str(tmp_path/'home'), 'PATH': ''})
    assert found.returncode == 0, found.stderr

@pytest.mark.parametrize('kind', KINDS)
def test_scores_of_layers(kind):
    model, batches = for_scores(kind, dtype=torch.float64)
    heads, seen, n = hf.HFHeads(model, batches, 'layers'), 0, 0
    for x in heads.batches:
        out = model.base_model(**{k: x[k] for k in ('input_ids', 'attention_mask', 'position_ids') if k in x}, output_hidden_states=True).hidden_states
        real = x['attention_mask'].bool()
        seen = seen + torch.stack([(1 - torch.cosine_similarity(a, b, -1))[real].sum() for a, b in zip(out, out[1:])])
        n += real.sum()
    found = score(heads, None, hf.influence)[:, 0]
    torch.testing.assert_close(found[:2], (seen / n)[:2].detach().float()) # the last state is normed in a decoder
    assert found.isfinite().all()
    z = torch.tensor([[1.], [1], [1]])
    torch.testing.assert_close(importance.leave_one_out(heads, z), plain_loop(heads, z))
    taylor = score(heads, None, 'taylor') # slope at z = 1
    with torch.enable_grad():
        def loss(z): return torch.cat([a for a, _, _ in heads.losses(z)]).sum() / sum(float(x[1].sum()) for x in heads.losses())
        step = 1e-4
        slopes = [(loss(z - step * torch.eye(3)[:, i:i + 1]) - loss(z)) / step for i in range(3)]
    torch.testing.assert_close(taylor[:, 0], torch.stack(slopes).detach().float(), rtol=.02, atol=1e-3)
    gates = hf.train_gates(model, batches, 1/3, 'layers', steps=5)
    small = hf.remove_heads(model, gates) # gates know their units
    assert len(hf.layers(small)) == 2 and type(small) is type(model)

@pytest.mark.parametrize('kind', ['bert', 'llama'])
def test_fisher_is_the_sum_of_squares_of_examples(kind):
    model, batches = for_scores(kind, dtype=torch.float64)
    found, squares, total = score(hf.HFHeads(model, batches, 'neurons', 1), None, hf.fisher), 0, 0
    for x in batches:
        for row in range(len(x['input_ids'])):
            one = {k: v[row:row + 1] for k, v in x.items()}
            heads = hf.HFHeads(model, one, 'neurons', 1)
            n = next(heads.losses())[1].sum()
            squares = squares + (score(heads, None, 'gradient').double() * n).square()
            total += n
    torch.testing.assert_close(found, (squares / total**2).float(), rtol=1e-4, atol=1e-12)

def test_a_layer_is_there_or_not():
    model = made('bert')
    for keep, z in ((torch.zeros(3, 1), None), (torch.ones(3, 1), torch.full((3, 1), .5))):
        with pytest.raises(ValueError, match='a layer is there or not, and one must stay'): hf.remove_heads(model, keep, z, 'layers')
    with pytest.raises(ValueError, match='not one number per head'): hf.remove_heads(model, torch.ones(3, 4), units='layers')
    gpt2 = made('gpt2', scale_attn_by_inverse_layer_idx=True) # a layer computes by its place
    with pytest.raises(ValueError, match='gpt2: layers removed: .*is its row right'): hf.remove_heads(gpt2, torch.tensor([[0], [1], [1]]), units='layers')

def rows_of(model, heads, k): # inputs of an output projection, and its weights with the bias as the last row
    read = []
    heads.outputs(lambda i, x: read.append(x) if i == k else None)
    f = heads.rows()[k].modules[-1]
    w, rows = hf.weight_rows(f).detach().T, []
    for x in read: # of a batch; long rows are shortened
        x = pad(x, (0, 1), value=1.)
        n = x.square().sum(1, keepdim=True).sqrt()
        rows.append(torch.where(n > 2 * n.median(), x * 2 * n.median() / n, x))
    x = torch.cat(rows)
    return (x[:, :-1], w) if f.bias is None else (x, torch.cat([w, f.bias.detach()[None]]))

@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('units,group', [('neurons', 1), ('neurons', 8), ('both', 8)])
def test_least_squares_never_raises_the_error_of_a_layer(kind, units, group):
    model, batches = for_scores(kind, dtype=torch.float64)
    heads = hf.HFHeads(model, batches, units, group)
    keep = random_mask(*heads.shape)
    small, cut = least_squares(heads, keep, None), hf.remove_heads(model, keep, units=units)
    for k, (row, a, b) in enumerate(zip(heads.rows(), heads.rows(small), heads.rows(cut))):
        x, w = rows_of(model, heads, k)
        stays = keep[row.i, row.span].repeat_interleave(hf.weight_rows(row.modules[-1]).shape[1] // len(row.span))
        if not stays.any(): continue
        if len(stays) < len(w): stays = torch.cat([stays, torch.ones(1).bool()])
        def weights(f): return hf.weight_rows(f).detach().T if f.bias is None else torch.cat([hf.weight_rows(f).detach().T, f.bias.detach()[None]])
        def error(w_small): return (x @ w - x[:, stays] @ w_small).square().sum()
        fitted, only_cut = weights(a.modules[-1]), weights(b.modules[-1])
        assert error(fitted) <= error(only_cut) * (1 + 1e-9)
        if not stays.all(): assert error(fitted) < error(only_cut)

class Layer: # an adapter of one layer of eight units, whose outputs are x
    shape = 1, 8
    def __init__(self, x): self.x, self.model = x, torch.nn.Linear(8, 4, bias=False, dtype=torch.float64)
    def outputs(self, look): look(0, self.x)
    def projection(self, i, model=None): return (model or self.model).weight.T, None
    def stays(self, keep): return keep
    def remove(self, keep):
        small = torch.nn.Linear(int(keep.sum()), 4, bias=False, dtype=torch.float64)
        small.weight = torch.nn.Parameter(self.model.weight.detach()[:, keep[0]])
        return small

def test_one_token_with_huge_outputs_does_not_ruin_the_others():
    torch.manual_seed(0)
    x = torch.randn(400, 8, dtype=torch.float64) @ torch.randn(8, 8, dtype=torch.float64)
    x[0, 7] = 1e5 # of a neuron that will be removed
    layer, keep = Layer(x), torch.arange(8)[None] < 7
    want = (layer.model(x) - layer.remove(keep)(x[:, :7]))[1:].square().sum() # lost by removal, on the other tokens
    small = least_squares(layer, keep, None)
    assert (layer.model(x) - small(x[:, :7]))[1:].square().sum() < want

def test_least_squares_of_both_kinds_is_that_of_each():
    model, batches = for_scores('llama', dtype=torch.float64)
    both, heads, neurons = (hf.HFHeads(model, batches, units, 8) for units in ('both', 'heads', 'neurons'))
    keep = random_mask(*both.shape)
    h = heads.shape[1]
    small = least_squares(both, keep, None)
    for own, part in ((heads, keep[:, :h]), (neurons, keep[:, h:])):
        one = least_squares(own, part, None)
        for a, b in zip(own.rows(small), own.rows(one)): assert torch.equal(a.modules[-1].weight, b.modules[-1].weight)
    again = hf.HFHeads(small, batches, 'both', 8) # and once again
    less = again.units_left & random_mask(*both.shape, seed=9)
    assert least_squares(again, less, None).num_parameters() < small.num_parameters()

@pytest.mark.parametrize('kind', KINDS)
def test_prune_removes_a_share_of_all_parameters(kind):
    model, batches = for_scores(kind)
    before = copy.deepcopy(model)
    small = hf.prune(model, batches, .1)
    cost = 16 * hf.HFHeads(model, None, 'neurons', 1).costs()[0, 0]
    assert abs(model.num_parameters() * .9 - small.num_parameters()) <= cost / 2
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters()))
    again = hf.prune(small, batches, .1) # a pruned model, too
    assert abs(small.num_parameters() * .9 - again.num_parameters()) <= cost / 2
    less = hf.prune(model, batches, .25, 'layers')
    assert len(hf.layers(less)) == 2 and type(less) is type(model)
    unlabelled = [{k: v for k, v in x.items() if k != 'labels'} for x in batches]
    assert hf.prune(model.base_model, unlabelled, .1).num_parameters() < model.base_model.num_parameters()
    for said, ask in (('share=0: give at most 0.[0-9]+, and more than 0; neurons hold no more', lambda: hf.prune(model, batches, 0)),
                      ('share=0.9: give at most 0.[0-9]+, and more than 0', lambda: hf.prune(model, batches, .9)),
                      ('share=0.01: less than half a layer', lambda: hf.prune(model, batches, .01, 'layers'))):
        with pytest.raises(ValueError, match=said) as e: ask()
        if 'at most' in said: most = float(str(e.value).split('at most ')[1].split(',')[0])
    assert hf.prune(model, batches, most).num_parameters() < model.num_parameters() # as promised

@pytest.mark.parametrize('kind', ['bert', 'llama'])
@pytest.mark.parametrize('units', ['heads', 'neurons', 'layers'])
def test_prune_by_another_score(kind, units):
    model, batches = for_scores(kind)
    share = .25 if units == 'layers' else .03
    def early(heads, z): return torch.arange(z.numel()).view(z.shape) # the first go
    usual, first, chance = (hf.prune(model, batches, share, units, method) for method in (None, early, 'random'))
    assert len({net.num_parameters() for net in (usual, first, chance)}) == 1 # as many, whatever the score
    named = hf.prune(model, batches, share, units, dict(heads='gradient', neurons=hf.fisher, layers=hf.influence)[units])
    assert all(torch.equal(a, b) for a, b in zip(usual.parameters(), named.parameters()))
    if units == 'layers': assert torch.equal(layer_weight(first), layer_weight(model, 1))
    else:
        stays = hf.units_left(first, units, hf.shape(model, units, 1)[1])
        assert not stays[0].all() and stays[1:].all()          # of the first layer
    with pytest.raises(ValueError, match='method=chance: unknown; give one of gates, random, '): hf.prune(model, batches, share, units, 'chance')

@pytest.mark.parametrize('kind', ['bert', 'llama'])
@pytest.mark.parametrize('own', [False, True])
def test_prune_by_gates_trains_them_and_refits(kind, own):
    model, batches = for_scores(kind)
    def loss(model, x): return 3 * model(**{k: x[k] for k in ('input_ids', 'attention_mask', 'labels')}).loss
    given = dict(loss=loss) if own else {}
    part = .06 * model.num_parameters() / float(hf.HFHeads(model, None).costs().sum()) # of the heads
    found = [hf.prune(model, batches, .06, 'heads', 'gates', seed=seed, **given) for seed in (3, 4)]
    for seed, small in zip((3, 4), found):
        left = hf.units_left(small, 'heads', hf.shape(model)[1])
        keep = hf.train_gates(model, batches, part, seed=seed, **given).open_mask().bool()
        assert torch.equal(left, keep) and not keep.all()
        want = least_squares(model, keep, batches)
        assert all(torch.equal(a, b) for a, b in zip(small.parameters(), want.parameters()))
    assert len(hf.layers(hf.prune(model, batches, .25, 'layers', 'gates'))) == 2

def test_gates_that_stop_early_are_done(monkeypatch):
    model, batches = for_scores('bert')
    seen, slow = [], hf._slow
    monkeypatch.setattr(hf, '_slow', lambda *args, **how: seen.append(slow(*args, **how)) or seen[-1])
    hf.train_gates(model, batches, .25, steps=40, patience=1)
    (gates,) = [b for b in seen if b.desc.startswith('training gates')]
    assert 10 < gates.n == gates.total < 40 # a notebook shows no fault

def test_the_report_names_its_method_and_what_it_is_compared_with():
    model, batches = for_scores('bert')
    model, unlabelled = model.base_model, [{k: v for k, v in x.items() if k != 'labels'} for x in batches]
    one = hf.prune(model, unlabelled, .1, method='random')
    assert re.match(r'[0-9]+ of 120 neurons removed \(random\): ', one.config.report) and 'distance to the whole model: ' in one.config.report
    two = hf.prune(one, unlabelled, .25, 'layers')
    assert re.search(r'layers removed: .*\nrelative squared distance to the model before: ', two.config.report.removeprefix(one.config.report))
    hf.heal(two, model, unlabelled, 1)
    assert 'healed for 1 steps: relative squared distance to the whole model: ' in two.config.report

def test_scores_that_rank_nothing_are_refused():
    model, batches = for_scores('bert')
    with pytest.raises(ValueError, match='scores: all equal, they rank nothing'): hf.prune(model, batches, .05, 'heads', 'persistent')
    with pytest.raises(ValueError, match='scores: all equal'): score(model, batches, lambda heads, z: torch.ones_like(z))
    with pytest.raises(ValueError, match='units=layers: without output weights'): hf.prune(model, batches, .25, 'layers', 'output_difference')

def test_the_report_of_an_encoder_warns_beyond_zeros():
    model, batches = for_scores('bert')
    model, unlabelled, said = model.base_model, [{k: v for k, v in x.items() if k != 'labels'} for x in batches], set()
    for method in (None, 'random'):
        small = hf.prune(model, unlabelled, .25, 'layers', method)
        distance = float(re.search('whole model: (.+?) ', small.config.report)[1])
        assert ('Warning: further from the whole model than zeros' in small.config.report) == (distance > 1)
        said.add(distance > 1)
    assert said == {True, False}
    usual, named = (hf.prune(model, unlabelled, .25, 'layers', m) for m in (None, 'leave_one_out'))
    assert all(torch.equal(a, b) for a, b in zip(usual.parameters(), named.parameters(), strict=True))

def test_a_name_in_place_of_a_model_and_models_swapped():
    model, batches = for_scores('bert')
    with pytest.raises(ValueError, match="model='bert': give a model"): hf.prune('bert', batches, .1)
    small, before = hf.prune(model, batches, .1), copy.deepcopy(model)
    with pytest.raises(ValueError, match='small: has more parameters than whole; swap them'): hf.heal(model, small, batches, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters()))

def layer_weight(model, i=0): return next(p for p in hf.layers(model)[i].parameters() if p.dim() == 2)

def three(x): return f'{x:#.3g}' # significant digits

def label_loss(model, data): # nats per label, by its definition
    with torch.no_grad(): losses = [each_loss('CausalLM' if model.config.model_type.endswith(tuple(DECODERS)) else '', model(**x), x) for x in data]
    return float(torch.stack(sum(losses, [])).mean())

@pytest.mark.parametrize('kind', ['bert', 'llama'])
@pytest.mark.parametrize('units', ['heads', 'neurons', 'layers'])
def test_the_report_says_what_was_removed_and_lost(kind, units, tmp_path):
    model, (x, judge) = for_scores(kind)
    left = hf.units_left(model, units, hf.shape(model, units, 1)[1])
    small = hf.prune(model, [x, x], .25 if units == 'layers' else .03, units, held_out=judge)
    gone = left.sum() - hf.units_left(small, units, left.shape[1]).sum() if units != 'layers' else 1
    name = 'groups of 2 heads' if (kind, units) == ('llama', 'heads') else units
    lost = label_loss(small, [judge])
    counts, losses, ms = small.config.report.splitlines()
    assert counts == f'{gone} of {left.sum()} {name} removed: {model.num_parameters():,} -> {small.num_parameters():,} parameters'
    assert losses == f'nats per label {three(label_loss(model, [judge]))} -> {three(lost)} (held-out batches: 1)'
    assert ms.endswith(' ms per token') and all(t == three(float(t)) and 0 < float(t) < 100 for t in ms.removesuffix(' ms per token').split(' -> '))
    hf.heal(small, model, [x], 3, held_out=judge)
    assert small.config.report.splitlines()[3] == f'healed for 3 steps: nats per label {three(lost)} -> {three(label_loss(small, [judge]))} (held-out batches: 1)'
    small.save_pretrained(tmp_path)
    again = type(small).from_pretrained(tmp_path)
    assert again.config.report == small.config.report and not getattr(model.config, 'report', '')
    if units != 'layers': assert all(f'- {line}' in (tmp_path/'README.md').read_text() for line in small.config.report.splitlines())
    other = hf.prune(again, [x, judge], .03, 'neurons') # the report goes on
    assert other.config.report.startswith(small.config.report) and len(other.config.report.splitlines()) == 7
    assert f'-> {three(label_loss(other, [x, judge]))} (batches that it was fitted to: 2)' in other.config.report

def test_the_report_of_an_encoder_and_of_an_own_loss():
    model, batches = for_scores('bert')
    def loss(model, x): return model(input_ids=x['input_ids'], attention_mask=x['attention_mask'], labels=x['labels']).loss
    small = hf.prune(model, batches, .1, loss=loss)
    with torch.no_grad(): a, b = (sum(float(loss(net, x)) for x in batches) / 2 for net in (model, small))
    assert f'own loss {three(a)} -> {three(b)} (batches that it was fitted to: 2)' in small.config.report
    model, x = model.base_model, {k: v for k, v in batches[0].items() if k != 'labels'}
    small = hf.prune(model, x, .1)
    a, b = hidden(model), hidden(small)
    want = ((a - b).square().sum(1) / a.square().sum(1)).mean() # over tokens
    assert f'\nrelative squared distance to the whole model: {three(want)} (batches that it was fitted to: 1)' in small.config.report

@pytest.mark.parametrize('scale,said', [(1000., r'1,\d{3}'), (1e5, r'\d{3},\d{3}'), (1e-3, r'0\.00\d{3}')])
def test_a_report_has_three_digits_of_any_size(scale, said):
    model, batches = for_scores('bert')
    def loss(model, x): return scale * (1.2 + 0 * model(input_ids=x['input_ids']).logits.mean() + model(input_ids=x['input_ids']).logits[0, 0] * .01)
    assert re.search(f'own loss {said} -> {said} ', hf.prune(model, batches, .1, loss=loss).config.report)

def test_units_that_prune_does_not_know():
    model, batches = for_scores('bert')
    for units in ('head', ['neurons'], 'both', 'Neurons'):
        with pytest.raises(ValueError, match=re.escape(f'units={units}: give neurons, heads or layers')): hf.prune(model, batches, .1, units)

def test_each_bar_says_what_is_done(monkeypatch):
    seen = []
    def bar(steps, name, *args, **how):
        seen.append(name)
        return progress.bar(steps, name, *args, **how)
    for module in (hf, repair, timing): monkeypatch.setattr(module, 'bar', bar)
    monkeypatch.setattr(hf, '_slow', bar)
    model, batches = for_scores('bert')
    rest = ['loss of the whole model', 'loss of the pruned model', 'timing, passes']
    for net, x, units in ((model, batches, 'neurons'), (model, batches, 'layers'), (model.base_model, [dict(input_ids=IDS)], 'heads')):
        seen.clear()
        hf.prune(net, x, .2 if units == 'layers' else .06, units)
        fit = [f'least squares, {units}', 'least squares, layers'] if units != 'layers' else []
        apart = net is not model                               # without labels, the whole model's distance to itself is known
        assert seen == ['outputs of the whole model', f'scoring {units}', *fit, *rest[apart:]]

WRONG = (([], 'batches: empty'), (iter([]), 'batches: empty'), (None, 'batches: empty'), (['a text'], 'batches=str: give dicts'), ('a text', 'batches=str: give dicts'),
         (IDS, 'batches=Tensor: give dicts'), (IDS.tolist(), 'batches=list: give dicts'), ([1, 2], 'batches=int: give dicts'), (dict(ids=IDS), 'batches=dict: .*with input_ids'),
         (dict(input_ids=IDS.tolist()), 'input_ids=list: give a tensor'), (dict(input_ids=IDS.numpy()), 'input_ids=ndarray: give a tensor'),
         (dict(input_ids=IDS[0]), r'input_ids=\[9\]: not rows'), (dict(input_ids=IDS[:0]), r'input_ids=\[0, 9\]: not rows'),
         (dict(input_ids=IDS + 60), 'input_ids: not tokens of 60'), (dict(input_ids=-IDS), 'input_ids: not tokens'), (dict(input_ids=IDS.float()), 'input_ids: not tokens'))

@pytest.mark.parametrize('batches,said', WRONG)
def test_wrong_batches_are_refused_everywhere(batches, said):
    model, (x, _) = for_scores('llama')
    for ask in (lambda: hf.prune(model, batches, .1), lambda: hf.heal(copy.deepcopy(model), model, batches, 2), lambda: score(model, batches, 'taylor'),
                lambda: hf.train_gates(model, batches, .25, steps=2), lambda: hf.prune(model, x, .1, held_out=[] if batches is None else batches)):
        with pytest.raises(ValueError, match=f'^{said}') as e: ask()
        assert '\n' not in str(e.value)

def test_heal_takes_any_number_of_steps_and_models_without_heads_to_remove():
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=60, hidden_size=32, n_layer=2, n_head=4)).eval()
    small = hf.prune(bloom, dict(input_ids=IDS), .1)
    def endless():
        while True: yield dict(input_ids=IDS)
    assert hf.heal(small, bloom, endless(), 2) is small
    with pytest.raises(ValueError, match='steps=0: give 1 or more'): hf.heal(small, bloom, dict(input_ids=IDS), 0)

def divergence(small, whole, x): # over tokens that are there, by its definition
    with torch.no_grad(): p, q = (net(**{k: v for k, v in x.items() if k != 'labels'}).logits.log_softmax(-1) for net in (whole, small))
    kl = (p.exp() * (p - q)).sum(-1)
    return float(kl[x['attention_mask'].bool()].mean() if kl.dim() > 1 else kl.mean())

@pytest.mark.parametrize('kind', ['bert', 'gpt2', 'llama'])
def test_heal_brings_predictions_closer(kind):
    model, batches = for_scores(kind)
    small = hf.prune(model, batches, .1)
    whole, before = copy.deepcopy(model), [divergence(small, model, x) for x in batches]
    healed = hf.heal(small, model, batches, 40, lr=1e-3)
    assert healed is small and not small.training
    assert all(divergence(small, model, x) < b / 2 for x, b in zip(batches, before))
    assert all(torch.equal(a, b) and a.grad is None for a, b in zip(model.parameters(), whole.parameters()))
    with pytest.raises(ValueError, match='small=torch.bfloat16: too coarse'): hf.heal(small.bfloat16(), model, batches, 2)

@pytest.mark.parametrize('kind', ['bert', 'llama'])
def test_each_step_of_healing_inside_autocast_sees_the_one_before(kind):
    model, batches = for_scores(kind)
    small = hf.prune(model, batches, .1)
    healed = {}
    for kept in (True, False): # may autocast keep its casts of the weights?
        healed[kept] = copy.deepcopy(small)
        with torch.autocast('cpu', torch.bfloat16, cache_enabled=kept): hf.heal(healed[kept], model, batches, 6, lr=1e-2)
    assert all(torch.equal(p, q) for p, q in zip(*(net.parameters() for net in healed.values())))
    assert any(not torch.equal(p, q) for p, q in zip(healed[True].parameters(), small.parameters()))

def test_heal_an_encoder():
    model, batches = for_scores('bert')
    model, batches = model.base_model, [{k: v for k, v in x.items() if k != 'labels'} for x in batches]
    small = hf.prune(model, batches, .15)
    def distance(): return (hidden(small) - hidden(model)).square().mean()
    before = distance()
    assert hf.heal(small, model, batches[0], 30, lr=1e-3) is small and distance() < before / 2

def test_a_model_cast_to_bfloat16_is_right():
    "The cast rounds rotary frequencies, which a reload computes."
    model = made('llama', head_dim=32, max_position_embeddings=300).to(torch.bfloat16)
    hf.check(model, dict(input_ids=torch.randint(3, 60, (2, 300), generator=torch.Generator().manual_seed(0)))) # far positions tell

def test_weights_of_a_file_that_was_quantized_are_plain_after_removal():
    model = made('llama')
    model.hf_quantizer, model.is_quantized, model.config.quantization_config = object(), True, {}
    small = hf.remove_heads(model, hf.units_left(model, 'layers', 1) & (torch.arange(hf.shape(model)[0])[:, None] > 0), units='layers')
    assert small.float().dtype == torch.float32 and model.is_quantized
