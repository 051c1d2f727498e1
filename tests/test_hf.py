"Hugging Face models where they can break: every architecture, uneven and empty layers, caches, folders."
import copy, subprocess, sys
from functools import partial
import pytest, torch
transformers = pytest.importorskip('transformers')
from torch.nn.functional import cross_entropy, pad
from allatt_prune import hf, hf_heads, hf_models, importance, LM, LMConfig, remove_heads
from allatt_prune.gates import HeadGates
from allatt_prune.importance import METHODS as ALL_METHODS, STATISTICS, attention_statistics, keep_mask, score
from allatt_prune.repair import REPAIRS, least_squares
from allatt_prune.targets import TargetGates

hf.add_architecture('gpt_neox', 'layers', 'attention.query_key_value attention.dense',
                    'mlp.dense_h_to_4h mlp.dense_4h_to_h') # from outside
SMALL = dict(vocab_size=60, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=40,
             max_position_embeddings=40, pad_token_id=0)
GROUPS = SMALL | dict(num_attention_heads=8, num_key_value_heads=4)
KINDS = dict(
    distilbert=dict(vocab_size=60, dim=32, n_layers=3, n_heads=4, hidden_dim=40, max_position_embeddings=40),
    bert=SMALL, roberta=SMALL | dict(max_position_embeddings=50),
    gpt2=dict(vocab_size=60, n_embd=32, n_layer=3, n_head=4, n_positions=40, bos_token_id=1, eos_token_id=2),
    llama=GROUPS, mistral=GROUPS | dict(sliding_window=7), qwen2=SMALL | dict(num_key_value_heads=4),
    qwen3=GROUPS | dict(head_dim=6), gpt_neox=SMALL)
DECODERS = [kind for kind in KINDS if kind not in ('distilbert', 'bert', 'roberta')]
TASKS = 'CausalLM MaskedLM SequenceClassification TokenClassification QuestionAnswering MultipleChoice'.split()
METHODS = [name for name in ALL_METHODS if name != 'persistent']  # there are no persistent keys
KEEP = torch.tensor([[0, 0, 0, 0], [1, 0, 1, 1], [0, 1, 0, 0]]).bool()  # the first layer is the cache's counter
Z = KEEP * torch.rand(3, 4, generator=torch.Generator().manual_seed(1)).add(.5)
IDS = torch.randint(3, 60, (3, 9), generator=torch.Generator().manual_seed(0))
PAD = torch.tensor([[1] * 9, [1] * 6 + [0] * 3, [1] * 4 + [0] * 5])
BATCH = dict(input_ids=IDS * PAD, attention_mask=PAD)

def made(kind, how='sdpa', dtype=torch.float32, task='SequenceClassification', **changes):
    torch.manual_seed(0)
    cfg = transformers.CONFIG_MAPPING[kind](**KINDS[kind] | changes)
    auto = getattr(transformers, f'AutoModelFor{task}' if task else 'AutoModel')
    model = auto.from_config(cfg, attn_implementation=how).to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters(): p += torch.randn_like(p) * .2                     # biases and norms, too
    if kind == 'gpt2' and task != 'CausalLM': model.config.pad_token_id = 0
    return model

def hidden(model): # of tokens that are there
    with torch.no_grad(): return model.base_model(**BATCH).last_hidden_state[PAD.bool()]

def projections(model, kind='heads'): # the output projections
    return [units.modules[-1] for units in hf_models.units_of(model, kind, 4)]

def mean_loss(model, batches, z=None): return hf.HFHeads(model, batches).mean_loss(z)

def same(a, b): # two models, bit by bit
    a, b = a.state_dict(), b.state_dict()
    return {*a} == {*b} and all(torch.equal(x, b[name]) for name, x in a.items())

def for_scores(kind, **changes): # a model, two batches of different sizes
    causal = kind in DECODERS
    labels = BATCH['input_ids'].masked_fill(PAD == 0, -100) if causal else torch.tensor([0, 1, 1])
    x = BATCH | dict(labels=labels)
    model = made(kind, task='CausalLM' if causal else 'SequenceClassification', **changes)
    return model, [x, {k: v[:2, :7] if v.dim() > 1 else v[:2] for k, v in x.items()}]

@pytest.mark.parametrize('how', ['eager', 'sdpa'])
@pytest.mark.parametrize('kind', KINDS)
def test_masked_equals_removed(kind, how):
    for dtype, eps in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        model = made(kind, how, dtype)
        whole = hidden(model)
        for z in (KEEP.float(), Z, torch.zeros(3, 4), torch.ones(3, 4)):
            with hf.masked(model, z): masked = hidden(model)
            assert (hidden(hf.remove_heads(model, z != 0, z)) - masked).abs().max() < eps
            assert torch.equal(hidden(model), whole)
            if (z != 1).any(): assert (masked - whole).abs().max() > 1e-2

@pytest.mark.parametrize('cache', ['dynamic', 'static'])
@pytest.mark.parametrize('kind', DECODERS)
def test_generate(kind, cache):
    model = made(kind, task='CausalLM')
    there = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1]])
    def text(net): return net.generate(input_ids=IDS[:, :4], attention_mask=there, max_new_tokens=12, min_new_tokens=12,
                                       do_sample=False, pad_token_id=0, cache_implementation=cache)
    with hf.masked(model, KEEP.float()): want = text(model)
    assert torch.equal(text(hf.remove_heads(model, KEEP)), want) and not torch.equal(text(model), want)

def has(kind, task): return task != 'CausalLM' if kind not in DECODERS else task not in ('MaskedLM', 'MultipleChoice')

@pytest.mark.parametrize('kind,task', [(kind, task) for kind in KINDS for task in ('', *TASKS) if has(kind, task)])
def test_reloaded_is_the_same(kind, task, tmp_path):
    small = hf.remove_heads(made(kind, task=task), KEEP, Z)
    small.save_pretrained(tmp_path)
    auto = getattr(transformers, f'AutoModelFor{task}' if task else 'AutoModel')
    again, told = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is type(small) and again.config.kept_heads == [[], [0, 2, 3], [1]]
    assert not any(told[k] for k in ('missing_keys', 'unexpected_keys', 'mismatched_keys'))
    assert same(again, small) and torch.equal(hidden(again), hidden(small))

@pytest.mark.parametrize('kind', KINDS)
def test_neurons_and_pruning_again(kind, tmp_path):
    model = made(kind, dtype=torch.float64)
    shape = hf.shape(model, 'both', 8)
    z = torch.rand(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    z *= z > .4
    z[1, 4:] = 0  # no neurons
    with hf.masked(model, z, 'both'): want = hidden(model)
    small = hf.remove_heads(model, z != 0, z, 'both')
    assert (hidden(small) - want).abs().max() < 1e-10 and small.num_parameters() < model.num_parameters()
    cost = hf.HFHeads(model, None, 'both', 8).costs() # parameters of a unit, without biases of inputs that stay
    assert model.num_parameters() - small.num_parameters() == ((z == 0) * cost).sum()
    small.save_pretrained(tmp_path)
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(hidden(again.eval()), hidden(small))
    less = z * (torch.arange(shape[1]) != 2) * (torch.arange(shape[1]) != shape[1] - 1)
    with hf.masked(model, less, 'both'): want = hidden(model)
    with hf.masked(again, (less != 0).double(), 'both'): masked = hidden(again)
    assert (masked - want).abs().max() < 1e-10
    smaller = hf.remove_heads(again, less != 0, units='both', inplace=True)
    assert smaller is again and (hidden(smaller) - want).abs().max() < 1e-10

@pytest.mark.parametrize('kind', ['distilbert', 'llama'])
def test_train_gates(kind):
    model, batches = for_scores(kind)
    before = copy.deepcopy(model.train())
    def open_units(*args, **kwargs):
        gates = hf.train_gates(model, *args, steps=12, **kwargs)
        assert gates.frozen and not gates.training
        return gates.open_mask()
    half = open_units(batches, .5)
    assert half.sum() == 6 and torch.equal(half, open_units(batches, .5))
    own = BATCH | dict(labels=BATCH['input_ids'].masked_fill(PAD == 0, -100))
    assert open_units([BATCH], 1/3).sum() == 8 # without labels: a decoder has its own
    assert kind == 'distilbert' or mean_loss(model.eval(), [BATCH]) == mean_loss(model, [own])
    model.train()
    assert open_units(batches, .25, loss=lambda model, x: model(**x).loss).sum() == 9
    cost, both = hf.HFHeads(model, None, 'both', 8).costs(), open_units(batches, .3, 'both', 8)
    assert .3 - cost.max() / cost.sum() <= 1 - (both * cost).sum() / cost.sum() <= .3 + 1e-6
    both = hf.train_gates(model, batches, .5, 'both', 8, steps=12)
    less = hf.remove_heads(model, both)
    assert less.config.neuron_groups and torch.equal(hf.HFHeads(less, None, 'both', 8).costs(), cost) # gates know their units
    assert hf.train_gates(less, batches, .6, 'both', 8, steps=12).open_mask().sum() < both.open_mask().sum()
    for rate in (.2, .3, .45): # as many as by scores
        assert open_units(batches, rate).sum() == keep_mask(torch.zeros(3, 4), rate).sum()
    none = [dict(x, labels=torch.full_like(x['labels'], -100)) for x in batches]
    small = hf.remove_heads(model, half)
    for said, ask in (('not classes named labels', lambda: open_units([dict(BATCH, label=IDS)], .5)),
                      ('not classes named labels', lambda: hf.HFHeads(made('bert', num_labels=1), [dict(BATCH, labels=torch.zeros(3).long())])),
                      ('no label counts', lambda: open_units(none, .5)),
                      ('labels: only in some', lambda: hf.HFHeads(made('bert'), [BATCH, batches[0]])),
                      ('ignores the gates', lambda: open_units(batches, .5, loss=lambda model, x: torch.ones(()))),
                      ('all rows of the batch', lambda: open_units(batches, .5, loss=lambda model, x: model(x['input_ids'][:1]).logits.sum())),
                      ('not one number per head', lambda: hf.remove_heads(model, half, units='both')),
                      ('not one number per head', lambda: hf.remove_heads(less, torch.ones(3, 8), units='both')), # it has 9
                      ('more is gone already', lambda: hf.train_gates(small, batches, .4)),
                      ('steps=0: give', lambda: hf.train_gates(model, batches, .5, steps=0)),
                      ('units=head: give one of heads', lambda: open_units(batches, .5, 'head')),
                      ('with input_ids', lambda: open_units([dict(ids=IDS)], .5))):
        with pytest.raises(ValueError, match=said): ask()
    gates = hf.train_gates(small, batches, .75, steps=12) # a pruned model loses more
    assert gates.open_mask().sum() == 3 and not (gates.open_mask() & ~half).any()
    assert model.training and same(model, before) and all(p.grad is None and p.requires_grad for p in model.parameters())

def test_masks_end_and_multiply():
    a, b = made('bert', 'eager'), made('distilbert')
    whole, other = hidden(a), torch.rand(3, 4)
    with pytest.raises(IndexError), hf.masked(a, Z): a(input_ids=torch.tensor([[99]]))
    assert torch.equal(hidden(a), whole)
    with hf.masked(a, Z * other): product = hidden(a)
    with hf.masked(b, other): want = hidden(b)
    with hf.masked(a, Z):
        with hf.masked(a, other), hf.masked(b, other):
            torch.testing.assert_close(hidden(a), product)
            assert torch.equal(hidden(b), want)
        one = hidden(a)
        small, copied = hf.remove_heads(a, KEEP, Z), copy.deepcopy(a)
    for net in (small, copied): # not masked a second time, nor by half
        with pytest.raises(ValueError, match='a copy made under its mask'): hidden(net)
    assert (hidden(hf.remove_heads(a, KEEP, Z)) - one).abs().max() < 1e-5

def test_wrong_numbers_are_refused():
    class Quantized(torch.nn.Linear): pass
    bert, (x, _) = for_scores('bert')
    small, odd, plain = hf.remove_heads(bert, KEEP), made('bert'), {k: v for k, v in x.items() if k != 'labels'}
    odd.bert.encoder.layer[1].attention.output.dense = Quantized(32, 32)
    for said, ask in (('removed before', lambda: hf.remove_heads(small, ~KEEP)),
                      ('of a whole model', lambda: score(small, [x], 'entropy')),
                      ('', lambda: hf.remove_heads(made('llama'), torch.ones(3, 8))),  # of 4 groups
                      ('', lambda: hf.masked(made('llama'), torch.ones(3, 8)).__enter__()),
                      ('', lambda: hf.masked(bert, HeadGates(4, 3)).__enter__()),
                      ('', lambda: hf.remove_heads(bert, KEEP, torch.ones(3, 4))),     # still open
                      ('Quantized: not plain; merge adapters', lambda: hf.remove_heads(odd, KEEP)),
                      ('no slope', lambda: score(bert, plain, 'gradient')), ('give a loss', lambda: score(bert, plain | dict(label_ids=IDS), 'taylor')),
                      ('give a loss', lambda: score(bert, plain | dict(labels=torch.rand(3)), 'taylor')),
                      ('give a loss', lambda: score(bert, plain | dict(start_positions=IDS[:, 0]), 'taylor')),
                      ('scores', lambda: score(bert, [x | dict(labels=torch.full((3,), -100))], 'taylor'))):
        with pytest.raises(ValueError, match=said): ask()
    for said, ask in (('batches: empty', lambda: score(bert.train(), [], 'output_difference')),
                      ('sparsity=0: give a share', lambda: hf.train_gates(bert, [x], 0)), ('sparsity=None', lambda: hf.train_gates(bert, [x], None)),
                      ('model=mamba: no row; describe it', lambda: hf.shape(transformers.MambaModel(transformers.MambaConfig(hidden_size=8, num_hidden_layers=1))))):
        with pytest.raises(ValueError, match=said): ask()
    assert bert.training and torch.equal(score(bert, plain, 'entropy'), score(bert, x, 'entropy'))

def test_a_removed_model_is_a_model_like_any_other(tmp_path):
    model = made('distilbert').train()
    frozen = model.distilbert.embeddings.word_embeddings, model.distilbert.transformer.layer[1].attention.q_lin
    for f in frozen: f.weight.requires_grad_(False)
    small = hf.remove_heads(model, KEEP)
    assert small.training and sum(not p.requires_grad for p in small.parameters()) == len(frozen)
    assert model.num_parameters() - small.num_parameters() == 8 * (4 * 32 * 8 + 3 * 8)
    optimizer = torch.optim.AdamW(small.parameters())
    small(**BATCH, labels=torch.tensor([0, 1, 0])).loss.backward()
    optimizer.step()
    assert all(p.grad is not None for p in small.parameters() if p.requires_grad)
    small.eval().save_pretrained(tmp_path, about='Nobody chose these heads.')
    card = (tmp_path/'README.md').read_text()
    for said in ('[0, 3, 1]', 'of 4', '`AutoModelForSequenceClassification.from_pretrained', 'Nobody chose'): assert said in card
    bare = hf.remove_heads(made('distilbert', 'eager', task=''), KEEP)                  # not yet saved
    assert [m.shape[1] for m in bare(**BATCH, output_attentions=True).attentions] == [1, 3, 1]
    (tmp_path/'README.md').write_text('mine')
    small.save_pretrained(tmp_path)
    assert (tmp_path/'README.md').read_text() == 'mine'
    with pytest.raises(ValueError, match='push_to_hub'): small.save_pretrained(tmp_path, push_to_hub=True)
    small.distilbert.save_pretrained(tmp_path/'base')
    assert torch.equal(hidden(transformers.AutoModel.from_pretrained(tmp_path/'base')), hidden(small))
    assert (tmp_path/'base/modeling_allatt_prune.py').read_text() == (tmp_path/'modeling_allatt_prune.py').read_text()
    odd = hf.remove_heads(transformers.GPT2DoubleHeadsModel(made('gpt2').config), KEEP)    # of no Auto class
    odd.save_pretrained(tmp_path/'odd')
    name = 'allatt_prune.hf_models.pruned_class(transformers.GPT2DoubleHeadsModel)'
    assert f'`{name}.from_pretrained' in (tmp_path/'odd/README.md').read_text()
    assert same(hf_models.pruned_class(transformers.GPT2DoubleHeadsModel).from_pretrained(tmp_path/'odd'), odd)
    def again(**how): return transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, **how)
    eager = again(attn_implementation='eager')
    assert (hidden(eager) - hidden(small)).abs().max() < 1e-5
    maps = eager(**BATCH, output_attentions=True).attentions
    assert [m.shape[1] for m in maps] == [1, 3, 1]  # of the empty layer: one that sees nothing
    assert (hidden(again(dtype=torch.bfloat16)) - hidden(small)).abs().max() < .1
    assert torch.equal(hidden(copy.deepcopy(small)), hidden(small))

def gini(p): # of (... k) weights, by its definition: mean difference of all pairs, over twice the mean
    return (p[..., :, None] - p[..., None, :]).abs().sum((-1, -2)) / (2 * p.shape[-1] * p.sum(-1))

OF_MAPS = dict(
    entropy=lambda p: -(p * p.clamp(min=1e-30).log()).sum(-1), gini=gini,
    concentration=lambda p: p.sort(-1, descending=True).values[..., :-(-p.shape[-1] // 10)].sum(-1),
    distance=lambda p: (p * (torch.arange(p.shape[-2])[:, None] - torch.arange(p.shape[-1])).abs()).sum(-1),
    persistent=lambda p: 0 * p[..., 0])

@pytest.mark.parametrize('kind', KINDS)
def test_statistics_are_those_of_the_maps(kind):
    model, batches = for_scores(kind)
    for z in (None, torch.rand(3, 4)):
        found = attention_statistics(model, batches, z=z)
        assert model.config._attn_implementation == 'sdpa' and {*found} == {*OF_MAPS} == {*STATISTICS}
        model.set_attn_implementation('eager')
        want, count = {name: torch.zeros(3, 4, dtype=torch.float64) for name in found}, 0
        for x in batches:
            with torch.no_grad(), hf.masked(model, z): maps = model(**x, output_attentions=True).attentions
            lengths = x['attention_mask'].sum(1)
            count += lengths.sum()
            for i, p in enumerate(maps):
                for name, f in OF_MAPS.items():
                    for own, n in zip(p, lengths):
                        want[name][i] += f(own[:, :n, :n]).double().sum(1).view(4, -1).mean(1)
        model.set_attn_implementation('sdpa')
        for name in found: torch.testing.assert_close(found[name], want[name] / count, atol=1e-6, rtol=1e-6)

@pytest.mark.parametrize('kind', KINDS)
def test_every_method_scores_every_kind_of_model(kind):
    model, batches = for_scores(kind)
    x = batches[0]
    wide = {k: v if v.dim() == 1 else pad(v, (0, 4), value=-100 if k == 'labels' else 0) for k, v in x.items()}
    before, z = copy.deepcopy(model.train()), torch.ones(3, 4)
    z[1, 2] = 0
    for method in METHODS:
        found = score(model, iter(batches), method)
        assert found.shape == (3, 4) and found.isfinite().all() and not found.requires_grad
        assert found.unique().numel() > 6
        assert torch.equal(found, score(model, batches, method)), method
        assert score(model, batches, method, z=z).isinf().nonzero().tolist() == [[1, 2]]
        torch.testing.assert_close(score(model, x, method), score(model, wide, method), atol=2e-5, rtol=1e-4) # padding
    assert model.training and same(model, before) and model.config._attn_implementation == 'sdpa'
    assert all(p.grad is None for p in model.parameters())

def squares(model): # of all parameters of heads
    return sum(p.double().square().sum().item() for *inputs, out in (x.modules for x in hf_models.units_of(model, 'heads', 4))
               for p in (out.weight, *(p for f in inputs for p in f.parameters())))

@pytest.mark.parametrize('kind', ['bert', 'gpt2', 'llama', 'gpt_neox'])
def test_scores_say_what_they_should(kind):
    model, batches = for_scores(kind, dtype=torch.float64)
    left, whole = score(model, batches, 'leave_one_out'), mean_loss(model, batches)
    keep = torch.ones(3, 4).bool()
    for at in ((0, 0), (1, 3), (2, 2)):
        one = keep.clone()
        one[at] = False
        assert left[at] == pytest.approx(mean_loss(hf.remove_heads(model, one), batches) - whole, rel=1e-3, abs=1e-5)
    keep[1, 0] = keep[2, 3] = False
    norms = score(model, None, 'magnitude').double().square()
    assert norms.sum().item() == pytest.approx(squares(model))
    assert norms[keep].sum().item() == pytest.approx(squares(hf.remove_heads(model, keep)))

def plain_loop(heads, z): # leave_one_out by whole passes
    losses = [heads.mean_loss(torch.where(torch.arange(z.numel()).view(z.shape) == at, 0, z)) for at in range(z.numel())]
    return torch.tensor(losses).view(z.shape) - heads.mean_loss(z)

@pytest.mark.parametrize('kind', KINDS)
def test_repairs(kind):
    model, batches = for_scores(kind, dtype=torch.float64)
    biased = projections(model)[0].bias is not None
    for repair in REPAIRS.values():
        assert (hidden(repair(model, torch.ones(3, 4), batches)) - hidden(model)).abs().max() < 1e-3
        assert repair(model, KEEP, batches).config.kept_heads == [[], [0, 2, 3], [1]]
    keep, read = torch.ones(3, 4).bool(), []
    keep[0, :2] = False  # the first layer, by definition
    hf.HFHeads(model, batches).outputs(lambda i, x: read.append(x) if i == 0 else None)
    lengths = [(x.square().sum(1, keepdim=True) + 1).sqrt() for x in read]
    shortened = torch.cat([torch.where(n > 2 * n.median(), 2 * n.median() / n, 1.) for n in lengths]) # in each batch
    x, stays = torch.cat(read), keep[0].repeat_interleave(read[0].shape[1] // 4)
    def weights(net):
        f = projections(net)[0]
        w = hf.weight_rows(f).detach().T
        return w if f.bias is None else torch.cat([w, f.bias.detach()[None]])
    W, ones = weights(model), x.new_ones(len(x), int(biased))
    whole, kept = (torch.cat([part, ones], 1) * shortened for part in (x, x[:, stays]))
    ridge = (.1 * kept.square().sum(0).mean()).sqrt() * torch.eye(kept.shape[1])
    own = W[torch.cat([stays, torch.ones(int(biased)).bool()])]
    change = torch.linalg.lstsq(torch.cat([kept, ridge]), pad(whole @ W - kept @ own, (0, 0, 0, len(ridge)))).solution
    want = own + change
    torch.testing.assert_close(weights(least_squares(model, keep, batches)), want, atol=1e-6, rtol=1e-6)

G = torch.Generator().manual_seed(3)
TOKENS = torch.randint(3, 60, (9, 7), generator=G)
COUNTS = torch.rand(9, 7, generator=G) < torch.linspace(.1, 1, 9)[:, None]
SOME = TOKENS.where(COUNTS, -100) # 0 to 7 labels in a row
CLASSES = torch.tensor([0, 1, -100, 1, 1, 0, -100, 0, 1])
NINE = { # kind, task, configuration, what nine examples have besides tokens
    'causal': ('gpt2', 'CausalLM', {}, dict(labels=SOME)),
    'causal, groups': ('llama', 'CausalLM', {}, dict(labels=SOME)),
    'masked': ('bert', 'MaskedLM', {}, dict(labels=SOME)),
    'tokens': ('roberta', 'TokenClassification', {}, dict(labels=torch.where(SOME < 0, -100, SOME % 2))),
    'classes': ('distilbert', 'SequenceClassification', {}, dict(labels=CLASSES)),
    'classes, causal': ('gpt2', 'SequenceClassification', {}, dict(labels=CLASSES)),
    'choice': ('bert', 'MultipleChoice', {}, dict(input_ids=torch.stack([TOKENS, TOKENS.flip(0)], 1), labels=CLASSES))}

def each_loss(task, out, x): # one for each label that counts, by its definition
    logits, y = (out.logits[:, :-1], x['labels'][:, 1:]) if task == 'CausalLM' else (out.logits, x['labels'])
    return [p.logsumexp(0) - p[b] for p, b in zip(logits.flatten(0, -2), y.flatten()) if b != -100]

@pytest.mark.parametrize('name', NINE)
def test_any_division_into_batches_says_the_same(name):
    kind, task, changes, nine = NINE[name]
    model = made(kind, dtype=torch.float64, task=task, **changes)
    nine, llama = dict(input_ids=TOKENS) | nine, kind == 'llama'
    with torch.no_grad(): losses = each_loss(task, model(**nine), nine)
    def cut(*sizes): return [dict(zip(nine, xs)) for xs in zip(*(x.split(list(sizes)) for x in nine.values()))]
    ways = [cut(9), cut(*[1] * 9), cut(2, 3, 4)]  # some parts have no label that counts
    for batches in ways: assert mean_loss(model, batches) == pytest.approx(sum(losses).item() / len(losses), rel=1e-6)
    with torch.no_grad(): assert mean_loss(model, nine) == pytest.approx(model(**nine).loss.item(), rel=1e-5)
    for method in METHODS:
        want = score(model, ways[0], method)
        for batches in ways[1:]: torch.testing.assert_close(score(model, batches, method), want, rtol=1e-5, atol=1e-6)
    want, *others = [least_squares(model, KEEP, batches).state_dict() for batches in ways]
    for other in others: torch.testing.assert_close(other, want, rtol=1e-5 if llama else 1e-7, atol=1e-7)
    def loss(row, step): # of head 2 of layer 1
        z = torch.ones(3, 4, dtype=torch.float64)
        z[1, 2] += step
        with torch.no_grad(), hf.masked(model, z): return float(sum(each_loss(task, model(**row), row)))
    eps = 2e-2 if llama else 1e-3                                                      # norms in float32 limit it
    slopes = [(loss(row, -eps) - loss(row, eps)) / (2*eps) / len(losses) for row in ways[1]]
    found = [score(model, nine, method)[1, 2].item() for method in ('taylor', 'gradient')]
    assert found == pytest.approx([sum(slopes), sum(map(abs, slopes))], rel=1e-2 if llama else 1e-4, abs=1e-5)

@pytest.mark.parametrize('kind', ['bert', 'gpt2'])
def test_sums_of_half_precision(kind): # are those of the same numbers in float64
    model, batches = for_scores(kind, dtype=torch.bfloat16)
    causal = kind in DECODERS
    with torch.no_grad(): logits = [model(**x).logits for x in batches]
    x = torch.cat([(x[:, :-1] if causal else x).flatten(0, -2) for x in logits])
    y = torch.cat([(x['labels'][:, 1:] if causal else x['labels']).flatten() for x in batches])
    assert mean_loss(model, batches) == pytest.approx(cross_entropy(x.double(), y).item(), rel=1e-6)
    seen = [[], [], []]
    hf.HFHeads(model, batches).outputs(lambda i, x: seen[i].append(x))
    found = score(model, batches, 'output_difference')
    for i, f in enumerate(projections(model)):
        x, w = torch.cat(seen[i]).double().unflatten(-1, (4, -1)), hf.weight_rows(f).double().unflatten(-1, (4, -1))
        parts = torch.einsum('nhd,chd->nhc', x, w)
        want = (parts.square().sum((0, 2)) / parts.sum(1).square().sum()).sqrt()
        torch.testing.assert_close(found[i].double(), want, rtol=1e-5, atol=0)

def test_gates():
    model, gates = made('gpt2'), HeadGates(3, 4)
    gates.log_alpha.data = KEEP * 4. - 2                                               # 12 % and 88 % open
    with hf.masked(model, gates):
        a, b = hidden(model), hidden(model)
        c, d = hidden(model.train()), hidden(model)
        model.base_model(**BATCH).last_hidden_state.sum().backward()
    assert torch.equal(a, b) and not torch.equal(c, d) and gates.log_alpha.grad.abs().sum() > 0
    assert (hidden(hf.remove_heads(model.eval(), gates)) - a).abs().max() < 1e-5
    assert sum(map(len, hf.remove_heads(model, TargetGates(3, 4, keep=5)).config.kept_heads)) == 5

def sum_of_squares(model, rows=IDS): return model.base_model(rows).last_hidden_state.square().sum()

@pytest.mark.parametrize('kind', KINDS)
def test_gates_and_gradient_checkpointing(kind):
    model, gates = made(kind, dtype=torch.float64).train(), HeadGates(3, 4).double()
    for p in model.modules():
        if isinstance(p, torch.nn.Dropout): p.p = 0.
    def passes(order): # two forward passes, each with a draw of its own, then the backward passes
        torch.manual_seed(1)
        for p in (*model.parameters(), *gates.parameters()): p.grad = None
        with hf.masked(model, gates):
            losses = [sum_of_squares(model, IDS), sum_of_squares(model, IDS.flip(1))]
            for i in order: losses[i].backward()
        return [p.grad for p in (*model.base_model.parameters(), *gates.parameters())]
    want = passes((0, 1))
    assert want[-1].abs().sum() > 0
    model.gradient_checkpointing_enable({'use_reentrant': False})
    for order in ((0, 1), (1, 0)): torch.testing.assert_close(passes(order), want, rtol=1e-9, atol=1e-9)
    with hf.masked(model, gates): loss = sum_of_squares(model)
    with pytest.raises(torch.utils.checkpoint.CheckpointError): loss.backward()        # too late: said, not wrong
    model.gradient_checkpointing_enable({'use_reentrant': True})
    with hf.masked(model, gates), pytest.raises(ValueError, match='use_reentrant=False'): sum_of_squares(model) # said, too

def test_models_in_wrappers(): # which nobody calls
    plain, batches = for_scores('bert')
    model = torch.nn.DataParallel(torch.compile(plain))
    for method in METHODS: assert torch.equal(score(model, batches, method), score(plain, batches, method))
    for repair in REPAIRS.values(): assert same(repair(model, KEEP, batches), repair(plain, KEEP, batches))
    with hf.masked(model, gates := HeadGates(3, 4)): sum_of_squares(plain.train()).backward()
    assert gates.log_alpha.grad.abs().sum() > 0 and mean_loss(model, batches, Z) == mean_loss(plain, batches, Z)

def test_the_trainer(tmp_path): # gates and weights together, then the small model
    pytest.importorskip('accelerate')
    model, gates, steps, slopes = made('distilbert'), HeadGates(3, 4), [], []
    rows = [dict(input_ids=IDS[i % 3], attention_mask=PAD[0], labels=torch.tensor(i % 2)) for i in range(48)]
    class Penalty(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            steps.append(state.global_step)
            slopes.append(gates.log_alpha.grad.abs().sum())  # of the text's loss
            (100. * gates.l0()).backward()
    def train(net, name, **more):
        args = transformers.TrainingArguments(
            str(tmp_path/name), per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=2,
            report_to=[], disable_tqdm=True, use_cpu=True)
        trainer = transformers.Trainer(net, args, train_dataset=rows, **more)
        trainer.train()
        trainer.save_model(tmp_path/name)
        return transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path/name)
    opt = torch.optim.Adam([dict(params=model.parameters(), lr=1e-4), dict(params=gates.parameters(), lr=.5)])
    with hf.masked(model, gates):
        again = train(model, 'whole', callbacks=[Penalty()], optimizers=(opt, None))
    assert steps == [*range(12)] and slopes[0] > 0 and not gates.open_mask().any()  # the penalty is stronger
    assert type(again) is type(model)
    small = hf.remove_heads(model, gates)
    assert torch.equal(hidden(train(small, 'small')), hidden(small.eval()))

def test_removal_in_place_leaves_other_models_of_the_same_configuration():
    config = made('gpt2').config
    a, b = (transformers.GPT2LMHeadModel(config).eval() for _ in range(2))
    z = torch.ones(3, 4)
    z[0, 3] = 0
    def logits():
        with torch.no_grad(), hf_heads.masked(b, z): return b(**BATCH).logits
    before = logits()
    hf.remove_heads(a, KEEP, inplace=True)
    assert torch.equal(logits(), before) and b.config.model_type == 'gpt2' != a.config.model_type

def test_a_card_counts_groups_as_groups(tmp_path):
    whole = made('llama', task='CausalLM')
    keep = torch.ones(hf.shape(whole))
    keep[1, 0] = 0
    hf.remove_heads(whole, keep).save_pretrained(tmp_path)
    size, n = whole.config.num_attention_heads // keep.shape[1], keep.shape[1]
    assert size > 1 and f'of {n} groups of {size} heads' in (tmp_path/'README.md').read_text()

@pytest.mark.parametrize('source,title,linked', [('someone/tiny-bert', 'tiny-bert', True), ('bert-base-uncased', 'bert-base-uncased', False), ('', 'BertModel', False),
                                                 ('own', 'BertModel', False), ('/gone/own', 'BertModel', False), ('../own/model', 'BertModel', False)])
def test_a_card_names_the_model_that_was_pruned(source, title, linked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path/'own').mkdir()
    small = hf.remove_heads(made('bert', task=''), KEEP)
    small.config._name_or_path = source
    small.save_pretrained('small')
    front, rest = (tmp_path/'small/README.md').read_text().removeprefix('---\n').split('---\n', 1)
    assert rest.startswith(f'# {title}, pruned\n') and front.splitlines() == ['library_name: transformers'] + [f'base_model: {source}'] * linked

def test_a_card_survives_a_second_save(tmp_path): # in another folder, or in its own after more was removed
    small = hf.remove_heads(made('bert'), KEEP)
    small.config._name_or_path, small.config.report = 'someone/tiny-bert', '5 of 12 heads kept'
    small.save_pretrained(tmp_path/'a', about='Nobody chose these heads.')
    card = (tmp_path/'a/README.md').read_text()
    for said in ('base_model: someone/tiny-bert', '# tiny-bert, pruned', '- 5 of 12 heads', 'Nobody chose', '[0, 3, 1]'): assert said in card
    for folder, to in ('ab', 'bc', 'ca'):
        again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path/folder)
        again.save_pretrained(tmp_path/to)
        assert (tmp_path/to/'README.md').read_text() == card
    less = KEEP.clone()
    less[1, 0] = False
    hf.remove_heads(again, less, inplace=True).save_pretrained(tmp_path/'c')
    assert (tmp_path/'c/README.md').read_text() == card.replace('[0, 3, 1]', '[0, 2, 1]')
    (tmp_path/'a/README.md').write_text(card + 'mine') # not by the package
    again.save_pretrained(tmp_path/'a')
    assert (tmp_path/'a/README.md').read_text() == card + 'mine'
    for config in ('{', '{"model_type": "gpt2", "n_layer": "x"}', None): # of something else, or none
        (tmp_path/'a/config.json').write_text(config) if config else (tmp_path/'a/config.json').unlink()
        again.save_pretrained(tmp_path/'a')
        assert (tmp_path/'a/README.md').read_text() == card + 'mine'

@pytest.mark.parametrize('kind', KINDS)
def test_padding_changes_nothing(kind): # on either side, or none
    model = made(kind, task='CausalLM' if kind in DECODERS else 'MaskedLM')
    rows = [torch.randint(3, 60, (n,), generator=torch.Generator().manual_seed(n)) for n in (3, 5, 8)]
    def padded(left): # rows of one batch
        def fill(x): return pad(x, (8 - len(x), 0) if left else (0, 8 - len(x)))
        return [dict(input_ids=torch.stack([*map(fill, rows)]), attention_mask=torch.stack([fill(torch.ones_like(x)) for x in rows]))]
    alone = [dict(input_ids=x[None]) for x in rows]
    z = torch.ones(3, 4).index_put((torch.tensor([0, 1]), torch.tensor([1, 2])), torch.tensor(.3))
    want = mean_loss(model, alone, z)
    for batches in (padded(False), padded(True)):
        assert mean_loss(model, batches, z) == pytest.approx(want, rel=1e-5)
        for method in ('gradient', 'leave_one_out', 'entropy'):
            torch.testing.assert_close(score(model, batches, method, z=z), score(model, alone, method, z=z), rtol=1e-3, atol=1e-4)

def logits(model, x=BATCH):
    with torch.no_grad(): return model(**x).logits

@pytest.mark.parametrize('how', ['module', 'wrapper', 'forward', 'layers', 'base'])
def test_compiled_models(how): # compiled before they are masked
    plain, model = made('llama', task='CausalLM'), made('llama', task='CausalLM')
    if how == 'module': model.compile(backend='eager')
    if how == 'wrapper': model = torch.compile(model, backend='eager')
    if how == 'forward': model.forward = torch.compile(model.forward, backend='eager')
    if how == 'layers': [layer.compile(backend='eager') for layer in model.model.layers]
    if how == 'base': model.model.forward = torch.compile(model.model.forward, backend='eager')
    logits(model)
    with hf.masked(plain, Z): want = logits(plain)
    with hf.masked(model, Z): assert torch.equal(logits(model), want)
    assert (logits(hf.remove_heads(model, KEEP, Z)) - want).abs().max() < 1e-5
    assert torch.equal(hf.train_gates(model, [BATCH], .5, steps=9).open_mask(), hf.train_gates(plain, [BATCH], .5, steps=9).open_mask())
    for method in ('output_difference', 'entropy', 'taylor', 'leave_one_out'): assert torch.equal(score(model, BATCH, method), score(plain, BATCH, method))
    assert same(least_squares(model, KEEP, [BATCH]), least_squares(plain, KEEP, [BATCH]))

def test_parts_that_skip_hooks_are_refused():
    model, whole = made('llama'), made('llama')
    model.forward = lambda **x: whole(**x)
    layer = made('llama')
    layer.model.layers[1] = torch.compile(layer.model.layers[1], backend='eager')
    traced = torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2))
    for said, net in (('forward is traced or replaced', model), ('layers.1 is traced or replaced', layer), ('not a plain one', traced)):
        with pytest.raises(ValueError, match=said): hf.masked(net, Z).__enter__()
        with pytest.raises(ValueError, match=said): hf.remove_heads(net, KEEP)
    odd = made('llama')
    f = odd.model.layers[0].self_attn.o_proj
    for layer in odd.model.layers: layer.forward = partial(lambda layer, x, **kwargs: x, layer)
    with pytest.raises(ValueError, match='skip hooks'), hf.masked(odd, Z): hidden(odd)

LLAMA = 'self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj'

def test_wrong_rows_are_refused(monkeypatch):
    monkeypatch.setattr(hf_models, 'ARCHITECTURES', dict(hf_models.ARCHITECTURES)) # other tests need the right ones
    for kind, said, row, changes in (
            ('modernbert', 'heads removed: .* from masked', ('attn.Wqkv attn.Wo',), dict(cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2)), # in three blocks
            ('phi3', 'heads removed: ', ('self_attn.qkv_proj self_attn.o_proj', '', 3), dict(eos_token_id=1, bos_token_id=1)), # sizes are fixed
            ('olmo2', 'heads removed: ', (LLAMA,), {})): # norms of all heads
        hf.add_architecture(kind, 'layers', *row)
        model = transformers.AutoModel.from_config(transformers.CONFIG_MAPPING[kind](**SMALL | changes)).eval()
        for ask in (lambda: hf.remove_heads(model, torch.ones(3, 4)), lambda: hf.train_gates(model, [BATCH], .25, steps=2), lambda: hf.check(model, BATCH)):
            with pytest.raises(ValueError, match=f'model={kind}: {said}.*is its row right') as e: ask()
            assert '\n' not in str(e.value)
    hf.add_architecture('modernbert', 'layers', 'attn.Wqkv attn.Wo', 'mlp.Wo mlp.Wi', 3) # the wrong way round
    model = transformers.AutoModel.from_config(transformers.CONFIG_MAPPING['modernbert'](**SMALL, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2))
    hf.check(model, BATCH, ['heads'])
    with pytest.raises(ValueError, match='modernbert: neurons'): hf.check(model, BATCH)

@pytest.mark.parametrize('kind', KINDS)
def test_check(kind): # of a given model, pruned or not, in any precision
    for dtype in (torch.float32, torch.bfloat16):
        model = made(kind, dtype=dtype).train()
        before = copy.deepcopy(model)
        hf.check(model, BATCH | dict(labels=torch.tensor([0, 1, 1]), text='abc'))
        assert same(model, before) and model.training
    hf.check(hf.remove_heads(model, KEEP), BATCH)

def test_other_kinds_of_models():
    hf.add_architecture('vit', 'layers', 'attention.q_proj attention.k_proj attention.v_proj attention.o_proj', 'mlp.fc1 mlp.fc2')
    vit = transformers.ViTForImageClassification(transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4)).eval()
    x = dict(pixel_values=torch.randn(4, 3, 16, 16), labels=torch.tensor([0, 1, 0, 1]))
    with hf.masked(vit, Z): want = logits(vit, x)
    assert (logits(hf.remove_heads(vit, KEEP, Z), x) - want).abs().max() < 1e-5
    assert mean_loss(vit, [x]) == pytest.approx(vit(**x).loss.item(), rel=1e-5)
    for data in (x, dict(pixel_values=x['pixel_values'])):
        assert hf.train_gates(vit, [data], .25, steps=3).open_mask().sum() == 9 and score(vit, data, 'entropy').isfinite().all()
    hf.add_architecture('gemma3', 'language_model.layers', LLAMA)
    vision = dict(model_type='siglip_vision_model', hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4)
    gemma = transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(
        text_config=SMALL | dict(num_key_value_heads=4, head_dim=8), vision_config=vision, mm_tokens_per_image=4)).eval()
    assert hf.shape(gemma) == (3, 4)
    hf.check(gemma, dict(input_ids=IDS))
    lfm2 = transformers.Lfm2Model(transformers.Lfm2Config(**SMALL, num_key_value_heads=4, layer_types=['conv', 'full_attention', 'conv']))
    hf.add_architecture('lfm2', 'layers', 'self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj')
    with pytest.raises(ValueError, match='has no self_attn.q_proj'): hf.masked(lfm2, Z).__enter__()
    with pytest.raises(ValueError, match='kind=bird: not in transformers'): hf.add_architecture('bird', 'layers', LLAMA)

def test_models_that_hand_nothing_to_attention(): # and checkpointing, where layers are run again
    hf.add_architecture('opt', 'decoder.layers', LLAMA.replace('o_proj', 'out_proj'), 'fc1 fc2', 1, 'num_heads embed_dim')
    model = transformers.OPTForCausalLM(transformers.OPTConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, ffn_dim=40, word_embed_proj_dim=32, dropout=0., max_position_embeddings=40)).double()
    with torch.no_grad(): [p.add_(torch.randn_like(p) * .2) for p in model.parameters()]
    with hf.masked(model.eval(), Z): want = logits(model)
    assert (logits(hf.remove_heads(model, KEEP, Z)) - want).abs().max() < 1e-10
    gates = HeadGates(3, 4).double()
    def slopes():
        torch.manual_seed(1)
        with hf.masked(model.train(), gates):
            losses = [model(input_ids=x).logits.square().sum() for x in (IDS, IDS.flip(1))]
            return [torch.autograd.grad(x, [gates.log_alpha])[0] for x in losses]
    want = slopes()
    model.gradient_checkpointing_enable({'use_reentrant': False})
    torch.testing.assert_close(slopes(), want)
    assert (want[0] - want[1]).abs().max() > 1e-3
    model.gradient_checkpointing_disable()
    with hf.masked(model, gates), pytest.raises(ValueError, match='run in part or again'):
        model.model.decoder.layers[0].self_attn.out_proj(torch.ones(1, 2, 32).double())

def test_distance_counts_all_outputs():
    model = made('bert', task='QuestionAnswering')
    with torch.no_grad(): model.qa_outputs.weight[0], model.qa_outputs.bias[0] = 0, 1 # the start is constant
    whole, z = model(**BATCH), torch.ones(3, 4).index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(0.))
    with hf.masked(model, z): out = model(**BATCH)
    def distance(a, b): return ((a - b) * PAD).square().sum(1) / (b * PAD).square().sum(1)
    want = (distance(out.start_logits, whole.start_logits) + distance(out.end_logits, whole.end_logits)) / 2
    assert mean_loss(model, [BATCH], z) == pytest.approx(want.mean().item(), rel=1e-5) and want.mean() > 1e-4
    wide = {k: pad(v, (0, 3)) for k, v in BATCH.items()}
    assert mean_loss(model, [wide], z) == pytest.approx(want.mean().item(), rel=1e-4)
    both = transformers.BertForPreTraining(transformers.BertConfig(**SMALL)).eval()
    with torch.no_grad(): both.cls.predictions.decoder.weight.zero_()
    assert mean_loss(both, [BATCH], z) > 0 # only the second output changes

def test_batches_as_they_come():
    model, (x, _) = for_scores('bert')
    read = []
    def endless():
        while True:
            read.append(1)
            yield x | dict(text=['a', 'b', 'c'], index=torch.arange(3))
    hf.train_gates(model, endless(), .25, steps=5)
    assert len(read) == 5
    seen = []
    def loss(model, x): return seen.append(x['text']) or model(input_ids=x['input_ids'], labels=x['labels']).loss
    hf.train_gates(model, endless(), .25, steps=2, loss=loss)
    assert seen == [['a', 'b', 'c']] * 2
    for name in ('input_ids', 'token_type_ids'):
        with pytest.raises(ValueError, match=f'{name}=list: give a tensor'): score(model, x | {name: IDS.tolist()}, 'taylor')
    for loss in (lambda model, x: sum(p.sum() for p in model.parameters()), lambda model, x: 0 * model(**x).loss):
        with pytest.raises(ValueError, match='ignores the gates'): hf.train_gates(model, [x], .25, steps=3, loss=loss)

def test_weights_that_something_computes_are_refused():
    from torch.nn.utils import parametrizations, prune, weight_norm
    ways = (lambda f: prune.l1_unstructured(f, 'weight', .5), lambda f: prune.l1_unstructured(f, 'bias', .5), weight_norm, parametrizations.weight_norm)
    for way in ways:
        for i, part in ((0, 'attention.self.query'), (2, 'attention.output.dense')):
            for inplace in (False, True):
                model = made('bert')
                way(model.bert.encoder.layer[i].get_submodule(part))
                with pytest.raises(ValueError) as e: hf.remove_heads(model, KEEP, inplace=inplace)
                assert '\n' not in str(e.value) and len(str(e.value)) < 100
                assert model.config.model_type == 'bert' and projections(model)[1].in_features == 32 # as it was
    for way in (lambda f: prune.l1_unstructured(f, 'weight', .5), weight_norm, parametrizations.weight_norm):
        for part in ('wq', 'wo'): # of the package's own models
            own = LM(LMConfig(vocab=10, n_layer=2, d_model=16, n_head=4, n_persistent=4, seg_len=8, mem_len=8))
            way(getattr(own.layers[0].attn, part))
            with pytest.raises(ValueError, match='hooks compute its weights'): remove_heads(own, torch.ones(2, 4))

def test_adapters():
    peft = pytest.importorskip('peft')
    keep, config = torch.ones(3, 4), peft.LoraConfig(r=2, target_modules=['q_proj', 'v_proj'], task_type='CAUSAL_LM')
    keep[1] = 0
    small = hf.remove_heads(made('llama', task='CausalLM'), keep)
    want = logits(small)
    with_lora = peft.get_peft_model(small, config)
    assert torch.equal(logits(with_lora), want) # untrained adapters, none in the empty layer
    model = peft.get_peft_model(made('llama', task='CausalLM'), config)
    with hf.masked(model, keep): assert (logits(model) - want).abs().max() < 1e-5
    for ask in (lambda: hf.train_gates(model, [BATCH], .25, steps=2), lambda: hf.remove_heads(model, keep)):
        with pytest.raises(ValueError, match='merge adapters'): ask()

def test_a_mask_leaves_its_gates_in_their_mode():
    model, gates = made('llama').eval(), HeadGates(3, 4)
    for mode in (True, False):
        gates.train(mode)
        with hf.masked(model, gates): model(IDS)
        assert gates.training == mode and not model.training

def test_scores_meet_a_transformers_model_before_hf_is_imported(): # it registers its adapter then
    code = '''import sys, torch
from allatt_prune.importance import ADAPTERS, score
assert len(ADAPTERS) == 1 and 'transformers' not in sys.modules
from transformers import BertConfig, BertModel
model = BertModel(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8))
assert score(torch.nn.DataParallel(model), None, 'magnitude').shape == (2, 2) and 'allatt_prune.hf' in sys.modules'''
    subprocess.run([sys.executable, '-c', code], check=True, timeout=120)
    with pytest.raises(ValueError, match='model=Linear: not an LM or of transformers'): score(torch.nn.Linear(2, 2), None, 'magnitude')

@pytest.mark.parametrize('units', ['heads', 'neurons', 'both'])
def test_a_mask_of_none_multiplies_by_one(units): # in groups of any size
    for model in (made('bert'), made('gpt2'), hf.remove_heads(made('bert'), torch.ones(3, 9).index_fill(1, torch.tensor([2, 7]), 0), units='both')):
        want = hidden(model)
        with hf.masked(model, None, units): assert torch.equal(hidden(model), want)

def test_names_of_units_are_checked_wherever_they_are_given():
    model = made('bert')
    for units in ('neuron', 'Heads', '', None, ['heads'], 3):
        for ask in (lambda: hf.units_left(model, units, 4), lambda: hf.shape(model, units), lambda: hf.HFHeads(model, None, units),
                    lambda: hf_models.units_of(model, units, 4), lambda: hf.masked(model, torch.ones(3, 4), units).__enter__(),
                    lambda: hf.remove_heads(model, KEEP, units=units),
                    lambda: hf.train_gates(model, [BATCH], .5, units), lambda: hf.check(model, BATCH, [units]), lambda: hf.check_once(model, [units])):
            with pytest.raises(ValueError) as e: ask()
            assert str(e.value) == f'units={units}: give one of heads, neurons, both, layers'
    assert [hf.units_left(model, *given).shape for given in (('heads', 4), ('neurons', 8), ('both', 9), ('layers', 1))] == [(3, 4), (3, 8), (3, 9), (3, 1)]
    small = hf.remove_heads(model, torch.ones(3, 8), units='neurons')
    for net, units, n in ((model, 'heads', 3), (model, 'heads', 5), (model, 'neurons', 7), (model, 'both', 3), (model, 'layers', 4), (small, 'neurons', 4)):
        with pytest.raises(ValueError, match=f'^n={n}: a layer of this model has|^group=') as e: hf.units_left(net, units, n)
        assert '\n' not in str(e.value)
    for net in (3, torch.nn.Linear(2, 2)):
        with pytest.raises(ValueError, match='not a plain one'): hf.units_left(net, 'heads', 4)

def test_a_mask_is_of_gates_or_numbers():
    model = made('bert')
    class Other(torch.nn.Module):
        def forward(self): return torch.ones(3, 4)
    for z in (lambda: torch.ones(3, 4), Other(), 'heads', 1., torch.ones(4), [[1, 0], [1]], dict(a=1), [None], [['1']]):
        for name, ask in (('z', lambda: hf.masked(model, z).__enter__()), ('keep', lambda: hf.remove_heads(model, z))):
            with pytest.raises(ValueError, match=f'^{name}={type(z).__name__}: not gates or one number per unit') as e: ask()
            assert '\n' not in str(e.value)
    with pytest.raises(ValueError, match='keep=NoneType: not gates'): hf.remove_heads(model, None)

@pytest.mark.parametrize('units', ['heads', 'neurons'])
def test_nested_masks_multiply_where_layers_are_run_again(units):
    model, found = made('llama', dtype=torch.float64).train(), []
    for again in (False, True):
        if again: model.gradient_checkpointing_enable({'use_reentrant': False})
        z = [torch.full(hf.shape(model, kind, 4), x, dtype=torch.float64).requires_grad_() for kind, x in (('heads', .7), (units, .5))]
        with hf.masked(model, z[0]), hf.masked(model, z[1], units): found.append(torch.autograd.grad(sum_of_squares(model), z))
    for a, b in zip(*found): torch.testing.assert_close(a, b)
    assert all(x.abs().sum() > 0 for x in found[0])

def test_reentrant_checkpointing_is_refused_before_it_runs():
    model = made('llama').train()
    model.gradient_checkpointing_enable({'use_reentrant': True})
    with hf.masked(model, HeadGates(3, 4)), pytest.raises(ValueError, match='use_reentrant=False'): model(IDS)
    model(IDS)  # as before, after the block
