"Hugging Face models where they can break: every architecture, uneven and empty layers, both attention functions, caches, folders."
import copy, subprocess, sys
import pytest, torch
transformers = pytest.importorskip('transformers')
from allatt_prune import hf
from allatt_prune.gates import HeadGates
from allatt_prune.importance import METHODS as ALL_METHODS, attention_statistics, mean_loss, score
from allatt_prune.repair import REPAIRS, least_squares, mean_folded, nothing
from allatt_prune.targets import SubsetGates, Target, TargetGates

SMALL = dict(vocab_size=60, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=40, max_position_embeddings=40, pad_token_id=0)
KINDS = dict(
    distilbert=dict(vocab_size=60, dim=32, n_layers=3, n_heads=4, hidden_dim=40, max_position_embeddings=40),
    bert=SMALL, roberta=SMALL | dict(max_position_embeddings=50),
    gpt2=dict(vocab_size=60, n_embd=32, n_layer=3, n_head=4, n_positions=40, bos_token_id=1, eos_token_id=2),
    llama=SMALL | dict(num_attention_heads=8, num_key_value_heads=4), mistral=SMALL | dict(num_attention_heads=8, num_key_value_heads=4, sliding_window=7),
    qwen2=SMALL | dict(num_key_value_heads=4), qwen3=SMALL | dict(num_attention_heads=8, num_key_value_heads=4, head_dim=6))
DECODERS = [k for k in KINDS if k not in ('distilbert', 'bert', 'roberta')]
KEEP = torch.tensor([[0, 0, 0, 0], [1, 0, 1, 1], [0, 1, 0, 0]]).bool()                # the first layer tells the cache how much was read
IDS = torch.randint(3, 60, (3, 9), generator=torch.Generator().manual_seed(0))
PAD = torch.tensor([[1] * 9, [1] * 6 + [0] * 3, [1] * 4 + [0] * 5])

METHODS = [name for name in ALL_METHODS if name != 'persistent']                        # these models have no persistent keys

def config(kind, **changes): return transformers.CONFIG_MAPPING[kind](**KINDS[kind] | changes)

def made(kind, how='sdpa', dtype=torch.float32, auto='AutoModelForSequenceClassification', **changes):
    torch.manual_seed(0)
    model = getattr(transformers, auto).from_config(config(kind, **changes), attn_implementation=how).to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters(): p += torch.randn_like(p) * .2                     # biases and norms, too
    if kind == 'gpt2' and auto != 'AutoModelForCausalLM': model.config.pad_token_id = 0
    return model

def batch(kind): return dict(input_ids=IDS * PAD, attention_mask=PAD)

def hidden(model, **how): # of tokens that are there
    with torch.no_grad(): return model.base_model(**batch(None), **how).last_hidden_state[PAD.bool()]

def watching(model, look): # look(layer, (b t hd) inputs of the output projections); to be removed
    return [layer.get_submodule(out).register_forward_pre_hook(lambda f, args, i=i: look(i, args[0])) for i, (layer, *_, out) in enumerate(hf.attentions(model))]

def z_of(keep): return keep * torch.rand(keep.shape, generator=torch.Generator().manual_seed(1)).add(.5)

@pytest.mark.parametrize('how', ['eager', 'sdpa'])
@pytest.mark.parametrize('kind', KINDS)
def test_masked_equals_removed(kind, how):
    for dtype, eps in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        model = made(kind, how, dtype)
        whole = hidden(model)
        for z in (KEEP.float(), z_of(KEEP), torch.zeros(3, 4), torch.ones(3, 4)):
            with hf.masked(model, z): masked = hidden(model)
            small = hf.remove_heads(model, z != 0, z)
            print(kind, how, dtype, (hidden(small) - masked).abs().max(), (masked-whole).abs().max())
            assert (hidden(small) - masked).abs().max() < eps
            assert torch.equal(hidden(model), whole) and model.config._attn_implementation == how
            if (z != 1).any(): assert (masked - whole).abs().max() > 1e-2

@pytest.mark.parametrize('cache', ['dynamic', 'static'])
@pytest.mark.parametrize('kind', DECODERS)
def test_generate(kind, cache):
    model = made(kind, auto='AutoModelForCausalLM')
    small = hf.remove_heads(model, KEEP)
    prompt = dict(input_ids=IDS[:, :4], attention_mask=torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1]]))
    how = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0, cache_implementation=cache)
    with hf.masked(model, KEEP.float()): want = model.generate(**prompt, **how)
    assert torch.equal(small.generate(**prompt, **how), want)
    assert not torch.equal(model.generate(**prompt, **how), want)

AUTO = [(kind, f'AutoModelFor{task}') for kind in KINDS for task in hf.TASKS if (kind not in DECODERS and task != 'CausalLM') or
        (kind in DECODERS and task not in ('MaskedLM', 'MultipleChoice'))] + [(kind, 'AutoModel') for kind in KINDS]

@pytest.mark.parametrize('kind,auto', AUTO)
def test_reloaded_is_the_same(kind, auto, tmp_path):
    model = made(kind, auto=auto)
    small = hf.remove_heads(model, KEEP, z_of(KEEP))
    small.save_pretrained(tmp_path)
    again, told = getattr(transformers, auto).from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is type(small) and again.config.kept_heads == [[], [0, 2, 3], [1]]
    assert not any(told[k] for k in ('missing_keys', 'unexpected_keys', 'mismatched_keys'))
    state = small.state_dict()
    assert {*state} == {*again.state_dict()} and all(torch.equal(p, state[k]) for k, p in again.state_dict().items())
    assert torch.equal(hidden(again), hidden(small))
    assert {p.name for p in tmp_path.iterdir()} >= {'config.json', 'model.safetensors', 'README.md'}

def test_the_model_is_as_before_whatever_happens():
    model, look = made('bert', 'eager'), []
    want = hidden(model)
    with pytest.raises(ZeroDivisionError):
        with hf.masked(model, KEEP.float()): 1 / 0
    with pytest.raises(IndexError), hf.masked(model, KEEP.float()): model(input_ids=torch.tensor([[99]]))
    assert torch.equal(hidden(model), want) and model.config._attn_implementation == 'eager'

def test_masks_in_masks_and_two_models_at_once():
    a, b = made('bert'), made('distilbert')
    other = torch.ones(3, 4)
    other[1, 2] = 0
    with hf.masked(a, KEEP.float()): want_a = hidden(a)
    with hf.masked(b, other): want_b = hidden(b)
    with hf.masked(a, KEEP.float()):
        with hf.masked(a, torch.ones(3, 4)), hf.masked(b, other):
            assert torch.equal(hidden(b), want_b) and not torch.equal(hidden(a), want_a)
        assert torch.equal(hidden(a), want_a)

@pytest.mark.parametrize('kind', KINDS)
def test_gradients_of_z(kind):
    model, z = made(kind, dtype=torch.float64), torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    def f(z):
        with hf.masked(model, z): return model.base_model(**batch(kind)).last_hidden_state[PAD.bool()].square().mean()
    found, eps = torch.autograd.grad(f(z), z)[0], 1e-3                                  # norms in float32 limit it in the Llama kind
    for at in ((0, 0), (1, 2), (2, 3)):
        step = torch.zeros(3, 4, dtype=torch.float64)
        step[at] = eps
        want = (f(z + step) - f(z - step)).item() / (2*eps)
        assert found[at].item() == pytest.approx(want, rel=2e-3, abs=1e-5)

def test_what_is_refused():
    llama, bert, keep = made('llama'), made('bert'), KEEP
    small = hf.remove_heads(bert, KEEP)
    t5 = transformers.T5Config(vocab_size=20, d_model=8, d_kv=4, num_heads=2, num_layers=1, d_ff=8)
    def refused(message, f, *args):
        with pytest.raises(ValueError, match=message) as e: f(*args)
        assert '\n' not in str(e.value) and '; ' in str(e.value)
    def enter(*args):
        with hf.masked(*args): pass
    for f in (enter, hf.remove_heads):
        refused('model=t5: not supported; give one of distilbert, bert', f, transformers.T5EncoderModel(t5), keep)
        refused('model=Linear: not supported', f, torch.nn.Linear(2, 2), keep)
        refused('model=allatt_prune-bert: heads were removed before; give the whole model', f, small, keep)
        refused(r'=\(3, 8\): not \(layers, groups\) = \(3, 4\): groups of 2 heads share', f, llama, torch.ones(3, 8))
        refused(r'=\(4, 3\): not \(layers, heads\) = \(3, 4\)', f, bert, torch.ones(4, 3))
    refused('z=non-zero: a head to be removed is still open', hf.remove_heads, bert, keep, torch.ones(3, 4))
    odd = made('bert')
    class Quantized(torch.nn.Linear): pass
    odd.bert.encoder.layer[1].attention.output.dense = Quantized(32, 32)
    refused('projection=Quantized: not plain; merge adapters', hf.remove_heads, odd, keep)
    refused('z=nan: not a finite number', hf.remove_heads, bert, keep, torch.where(keep, torch.nan, 0.))
    for bad in (None, [[0]] * 2, [[0]] * 4, [[4], [], []], [[1, 0], [], []], [[0, 0], [], []], [0, 1, 2], 'all', [['0'], [], []]):
        small.config.kept_heads = bad
        refused('kept_heads=.*: not the numbers of kept heads, up to 3, in 3 layers', type(small), small.config)

def test_a_removed_model_is_a_model_like_any_other(tmp_path):
    model = made('distilbert').train()
    model.distilbert.embeddings.word_embeddings.weight.requires_grad_(False)
    model.distilbert.transformer.layer[1].attention.q_lin.weight.requires_grad_(False)
    small = hf.remove_heads(model, KEEP)
    assert not small.distilbert.transformer.layer[1].attention.q_lin.weight.requires_grad
    assert small.training and not small.distilbert.embeddings.word_embeddings.weight.requires_grad
    assert sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in small.parameters()) == 8 * (4 * 32 * 8 + 3 * 8)
    optimizer = torch.optim.AdamW(small.parameters())
    for _ in range(2):
        loss = small(**batch(None), labels=torch.tensor([0, 1, 0])).loss
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    assert all(p.grad is not None for p in small.parameters() if p.requires_grad)
    small.eval().save_pretrained(tmp_path)
    for how in ('eager', 'sdpa'):
        again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, attn_implementation=how)
        assert (hidden(again) - hidden(small)).abs().max() < 1e-5
    again.set_attn_implementation('eager')
    maps = again(**batch(None), output_attentions=True).attentions
    assert [m.shape[1] for m in maps] == [1, 3, 1]                                     # of the empty layer: one that sees nothing
    half = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16 and (hidden(half) - hidden(small)).abs().max() < .1
    assert torch.equal(hidden(copy.deepcopy(small)), hidden(small))
    torch.save(small, tmp_path/'whole.pt')
    assert torch.equal(hidden(torch.load(tmp_path/'whole.pt', weights_only=False)), hidden(small))

def test_the_card(tmp_path):
    small = hf.remove_heads(made('llama', auto='AutoModelForCausalLM'), KEEP)
    small.save_pretrained(tmp_path)
    card = (tmp_path/'README.md').read_text()
    assert 'LlamaForCausalLM with 4 of 12 attention heads' in card and '0. none\n1. 0, 2, 3\n2. 1\n' in card
    (tmp_path/'README.md').write_text('mine')
    small.save_pretrained(tmp_path)
    assert (tmp_path/'README.md').read_text() == 'mine'

WITHOUT = """import sys, transformers
try: getattr(transformers, sys.argv[2]).from_pretrained(sys.argv[1])
except Exception as e: print(type(e).__name__, e)
else: print('opened')"""

@pytest.mark.parametrize('kind', ['distilbert', 'gpt2', 'llama'])
def test_opened_without_us(kind, tmp_path):
    model = made(kind)
    hf.remove_heads(model, KEEP).save_pretrained(tmp_path)
    def told(auto): return subprocess.run([sys.executable, '-c', WITHOUT, str(tmp_path), auto], capture_output=True, text=True, timeout=300)
    assert f'allatt_prune-{kind}' in (out := told('AutoModel').stdout) and 'does not recognize' in out, out
    plain = told(type(model).__name__)
    assert 'opened' not in plain.stdout and 'RuntimeError' in plain.stdout and 'size' in plain.stdout, plain.stdout + plain.stderr
    assert f'allatt_prune-{kind}' in plain.stderr

def labelled(kind, auto):
    x = batch(kind)
    return x | dict(labels=x['input_ids'].masked_fill(PAD == 0, -100) if auto == 'AutoModelForCausalLM' else torch.tensor([0, 1, 1]))

def for_scores(kind, **changes):
    auto = 'AutoModelForCausalLM' if kind in DECODERS else 'AutoModelForSequenceClassification'
    return made(kind, auto=auto, **changes), [labelled(kind, auto), {k: v[:2, :7] if v.dim() > 1 else v[:2] for k, v in labelled(kind, auto).items()}]

def gini(p): # of (..., k) weights, by its definition: mean difference of all pairs, over twice the mean
    k = p.shape[-1]
    return (p[..., :, None] - p[..., None, :]).abs().sum((-1, -2)) / (2 * k * p.sum(-1))

OF_MAPS = dict(
    entropy=lambda p: -(p * p.clamp(min=1e-30).log()).sum(-1), sparsity=gini,
    concentration=lambda p: p.sort(-1, descending=True).values[..., :-(-p.shape[-1] // 10)].sum(-1),
    distance=lambda p: (p * (torch.arange(p.shape[-2])[:, None] - torch.arange(p.shape[-1])).abs()).sum(-1))

@pytest.mark.parametrize('how', ['eager', 'sdpa'])
@pytest.mark.parametrize('kind', KINDS)
def test_statistics_are_those_of_the_maps(kind, how):
    model, batches = for_scores(kind, how=how)
    z = torch.rand(3, 4, generator=torch.Generator().manual_seed(5))
    for z in (None, z):
        found = attention_statistics(model, batches, z=z)
        model.set_attn_implementation('eager')
        want, count = {name: torch.zeros(3, 4, dtype=torch.float64) for name in found}, 0
        for x in batches:
            with torch.no_grad(), hf.masked(model, z): maps = model(**x, output_attentions=True).attentions
            real, groups = x['attention_mask'].bool(), len(maps[0][0]) // 4
            count += real.sum()
            for i, p in enumerate(maps):
                for name, f in OF_MAPS.items():
                    for own, n in zip(p, real.sum(1)): want[name][i] += f(own[:, :n, :n]).double().sum(1).reshape(4, groups).mean(1)
        model.set_attn_implementation(how)
        assert {*found} == {*OF_MAPS}
        for name in found: torch.testing.assert_close(found[name], want[name] / count, atol=1e-6, rtol=1e-6)

@pytest.mark.parametrize('kind', KINDS)
def test_more_padding_changes_nothing(kind):
    model, (x, _) = for_scores(kind)
    wide = {k: v if v.dim() == 1 else torch.nn.functional.pad(v, (0, 4), value=-100 if k == 'labels' else 0) for k, v in x.items()}
    for method in METHODS:
        torch.testing.assert_close(score(model, [x], method), score(model, [wide], method), atol=2e-5, rtol=1e-4)

@pytest.mark.parametrize('kind', KINDS)
def test_every_method_scores_every_kind_of_model(kind):
    model, batches = for_scores(kind)
    model.train()
    before = {k: x.clone() for k, x in model.state_dict().items()}
    z = torch.ones(3, 4)
    z[1, 2] = 0
    for method in METHODS:
        found = score(model, iter(batches), method)
        assert found.shape == (3, 4) and found.isfinite().all() and not found.requires_grad and found.unique().numel() > 6
        assert torch.equal(found, score(model, batches, method)), method
        assert score(model, batches, method, z=z).isinf().nonzero().tolist() == [[1, 2]]
    assert model.training and all(torch.equal(x, before[k]) for k, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and model.config._attn_implementation == 'sdpa'

@pytest.mark.parametrize('kind', ['bert', 'gpt2', 'llama'])
def test_scores_say_what_they_should(kind):
    model, batches = for_scores(kind, dtype=torch.float64)
    taylor, eps = score(model, batches, 'taylor'), 2e-2 if kind == 'llama' else 1e-3 # norms in float32 limit it in the Llama kind
    def loss(z): # in double precision, which that of the models is not
        with torch.no_grad(), hf.masked(model, z): found = [(model(**x).logits, x['labels']) for x in batches]
        if kind in DECODERS: found = [(out[:, :-1].flatten(0, 1), y[:, 1:].flatten()) for out, y in found]
        out, y = (torch.cat(x) for x in zip(*found))                                   # of both batches, each label counts once
        return torch.nn.functional.cross_entropy(out, y).item()
    left, whole = score(model, batches, 'leave_one_out'), loss(torch.ones(3, 4))
    assert mean_loss(model, batches) == pytest.approx(whole, rel=1e-12)
    for at in ((0, 0), (1, 3), (2, 2)):
        z = torch.ones(3, 4)
        z[at] = 0
        assert left[at] == pytest.approx(mean_loss(hf.remove_heads(model, z), batches) - whole, rel=1e-3, abs=1e-5)
        more, less = torch.ones(3, 4, dtype=torch.float64), torch.ones(3, 4, dtype=torch.float64)
        more[at] += eps; less[at] -= eps
        assert taylor[at] == pytest.approx((loss(less) - loss(more)) / (2*eps), rel=5e-3, abs=1e-5)
    assert (score(model, batches, 'gradient') >= taylor.abs() - 1e-6).all()
    assert (score(model, None, 'magnitude').double()**2).sum(1).numpy() == pytest.approx([sum(p.double().square().sum().item() for path in (*inputs, out) for name, p in
        layer.get_submodule(path).named_parameters() if (path, name) != (out, 'bias')) for layer, _, inputs, out in hf.attentions(model)])
    silent = copy.deepcopy(model)                                                      # a head that adds nothing, and has no parameters
    *_, inputs, out = row = hf.attentions(silent)[1]
    with torch.no_grad(): row[0].get_submodule(out).weight.zero_()
    assert torch.equal(score(silent, batches, 'output_difference')[1], torch.zeros(4))
    keep = torch.ones(3, 4).bool()
    keep[1, 0] = keep[2, 3] = False
    kept = score(model, None, 'magnitude').double()[keep]
    assert kept.square().sum().item() == pytest.approx(sum(p.double().square().sum().item() for layer, _, inputs, out in hf.attentions(
        hf.remove_heads(model, keep)) for path in (*inputs, out) for n, p in layer.get_submodule(path).named_parameters() if (path, n) != (out, 'bias')))

def test_scores_that_are_refused():
    model, batches = for_scores('distilbert')
    plain = [{k: v for k, v in x.items() if k != 'labels'} for x in batches]
    def refused(message, *args):
        with pytest.raises(ValueError, match=message) as e: score(*args)
        assert '\n' not in str(e.value) and '; ' in str(e.value)
    refused('method=persistent: these models have no persistent vectors', model, batches, 'persistent')
    refused('method=entrpy: unknown; give entropy', model, batches, 'entrpy')
    for bad in ([], [IDS], 'text', [('a', 1)], [dict(text='a')]): refused('batches=.*: not what the model takes', model, bad, 'entropy')
    for method in ('gradient', 'taylor', 'leave_one_out'): refused('labels=None: there is no loss without', model, plain, method)
    for method in ('entropy', 'output_difference', 'magnitude', 'random'): assert torch.equal(score(model, plain, method), score(model, batches, method))
    refused('heads were removed before', hf.remove_heads(model, KEEP), batches, 'entropy')
    assert not model.training
    refused('labels=None', model.train(), plain, 'taylor')
    assert model.training and model.config._attn_implementation == 'sdpa'              # as they were

def test_classes_of_the_same_name_are_not_confused():
    class BertForSequenceClassification(transformers.BertForSequenceClassification): pass
    mine = BertForSequenceClassification(config('bert'))
    assert isinstance(hf.remove_heads(mine, KEEP), BertForSequenceClassification)
    assert not isinstance(hf.remove_heads(made('bert'), KEEP), BertForSequenceClassification)

@pytest.mark.parametrize('kind', KINDS)
def test_repairs(kind):
    model, batches = for_scores(kind, dtype=torch.float64)
    for name, repair in REPAIRS.items():
        if name == 'mean_folded' and kind in ('llama', 'mistral', 'qwen2', 'qwen3'):
            with pytest.raises(ValueError, match='repair=mean_folded: .* has no output bias'): repair(model, KEEP, batches)
            continue
        same = repair(model, torch.ones(3, 4), batches)
        assert (hidden(same) - hidden(model)).abs().max() < 1e-3
        assert repair(model, KEEP, batches).config.kept_heads == [[], [0, 2, 3], [1]]
    for p in model.parameters(): p.data *= .1                                          # so that the layer is nearly linear in what is fitted
    def error(repair, keep): # of what the first attention adds
        def adds(net):
            layer, *_, out = hf.attentions(net)[0]
            seen = []
            hook = layer.get_submodule(out).register_forward_hook(lambda m, x, y: seen.append(y))
            hidden(net); hook.remove()
            return seen[0][PAD.bool()]
        return (adds(repair(model, keep, batches[:1])) - adds(model)).square().mean().item()
    for keep in (torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1]]), KEEP):
        assert error(least_squares, keep) <= error(nothing, keep)
        if kind in ('bert', 'gpt2'): assert error(least_squares, keep) <= error(mean_folded, keep) + 1e-12 < error(nothing, keep)

@pytest.mark.parametrize('kind', ['bert', 'gpt2'])
def test_what_repairs_put_into_the_first_layer(kind):
    model, batches = for_scores(kind, dtype=torch.float64)
    keep, read = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1]]).bool(), []
    def look(i, out):
        if i == 0: read.append(out[x['attention_mask'].bool()])
    hooks = watching(model, look)
    with torch.no_grad():
        for x in batches: model(**x)
    for hook in hooks: hook.remove()
    x, stays = torch.cat(read), keep[0].repeat_interleave(8)
    def projection(net):
        layer, *_, out = hf.attentions(net)[0]
        f = layer.get_submodule(out)
        return (f.weight if kind == 'gpt2' else f.weight.T).detach(), f.bias.detach()
    w, b = projection(model)
    new, bias = projection(mean_folded(model, keep, batches))
    torch.testing.assert_close(new, w[stays])
    torch.testing.assert_close(bias, b + x[:, ~stays].mean(0) @ w[~stays])
    ones = torch.ones(len(x), 1, dtype=x.dtype)
    want = torch.linalg.lstsq(torch.cat([x[:, stays], ones], 1), x @ w + b).solution   # ours is ridged by a millionth
    new, bias = projection(least_squares(model, keep, batches))
    torch.testing.assert_close(torch.cat([new, bias[None]]), want, atol=1e-2, rtol=1e-2)

def sum_of_squares(model, rows=IDS): return model.base_model(rows).last_hidden_state.square().sum()

G = torch.Generator().manual_seed(3)
TOKENS = torch.randint(3, 60, (9, 7), generator=G)
SOME = torch.rand(9, 7, generator=G) < torch.linspace(.1, 1, 9)[:, None]                # rows have from 0 to 7 labels
CLASSES = torch.tensor([0, 1, -100, 1, 1, 0, -100, 0, 1])
NINE = { # task, what it is besides: kind, configuration, batch of nine
    'causal': ('gpt2', 'CausalLM', {}, dict(input_ids=TOKENS, labels=TOKENS.masked_fill(~SOME, -100))),
    'causal, groups': ('llama', 'CausalLM', {}, dict(input_ids=TOKENS, labels=TOKENS.masked_fill(~SOME, -100))),
    'masked': ('bert', 'MaskedLM', {}, dict(input_ids=TOKENS, labels=TOKENS.masked_fill(~SOME, -100))),
    'tokens': ('roberta', 'TokenClassification', {}, dict(input_ids=TOKENS, labels=(TOKENS % 2).masked_fill(~SOME, -100))),
    'classes': ('distilbert', 'SequenceClassification', {}, dict(input_ids=TOKENS, labels=CLASSES)),
    'classes, causal': ('gpt2', 'SequenceClassification', {}, dict(input_ids=TOKENS, labels=CLASSES)),
    'number': ('bert', 'SequenceClassification', dict(num_labels=1), dict(input_ids=TOKENS, labels=torch.randn(9, generator=G))),
    'numbers': ('bert', 'SequenceClassification', dict(num_labels=3, problem_type='regression'),
                dict(input_ids=TOKENS, labels=torch.randn(9, 3, generator=G))),
    'several': ('bert', 'SequenceClassification', dict(num_labels=3), dict(input_ids=TOKENS, labels=(torch.randn(9, 3, generator=G) > 0).float())),
    'choice': ('bert', 'MultipleChoice', {}, dict(input_ids=torch.randint(3, 60, (9, 2, 7), generator=G), labels=CLASSES)),
    'question': ('distilbert', 'QuestionAnswering', {}, dict(input_ids=TOKENS, start_positions=torch.tensor([0, 3, 9, 7, 2, 1, 1, 5, 6]),
                                                             end_positions=torch.tensor([2, 3, 9, 7, 7, 5, 1, 6, 6])))}

def each_loss(task, out, x): # one for each label that counts, by its definition
    if task == 'QuestionAnswering':
        pairs = [(p, y) for p, y in zip([*out.start_logits, *out.end_logits], [*x['start_positions'], *x['end_positions']]) if y < len(p)]
    else:
        logits, y = (out.logits[:, :-1], x['labels'][:, 1:]) if task == 'CausalLM' else (out.logits, x['labels'])
        if y.is_floating_point() and set(y.unique().tolist()) <= {0., 1.}: return [torch.where(b == 1, -p.sigmoid().log(), -(-p).sigmoid().log()).mean() for p, b in zip(logits, y)]
        if y.is_floating_point(): return [(p - b).square().mean() for p, b in zip(logits, y)]
        pairs = [(p, b) for p, b in zip(logits.flatten(0, -2), y.flatten()) if b != -100]
    return [p.logsumexp(0) - p[y] for p, y in pairs]

@pytest.mark.parametrize('name', NINE)
def test_any_division_into_batches_says_the_same(name):
    kind, task, changes, nine = NINE[name]
    model = made(kind, dtype=torch.float64, auto=f'AutoModelFor{task}', **changes)
    with torch.no_grad(): losses = each_loss(task, model(**nine), nine)
    def cut(*sizes): return [dict(zip(nine, xs)) for xs in zip(*(x.split(list(sizes)) for x in nine.values()))]
    ways = [cut(9), cut(8, 1), cut(*[1] * 9), cut(2, 3, 4)]                            # some parts have no label that counts
    for batches in ways: assert mean_loss(model, batches) == pytest.approx(sum(losses).item() / len(losses), rel=1e-6 if kind == 'llama' else 1e-10)
    if task != 'QuestionAnswering':                                                    # whose model weighs starts and ends by half
        with torch.no_grad(): assert mean_loss(model, nine) == pytest.approx(model(**nine).loss.item(), rel=1e-5)
    for method in METHODS:
        want = score(model, ways[0], method)
        assert want.unique().numel() > 6
        for batches in ways[1:]: torch.testing.assert_close(score(model, batches, method), want, rtol=1e-5, atol=1e-6)
    for name, repair in REPAIRS.items():
        if name == 'mean_folded' and kind == 'llama': continue
        want, *others = [repair(model, KEEP, batches).state_dict() for batches in ways]
        for other in others: torch.testing.assert_close(other, want, rtol=1e-5 if kind == 'llama' else 1e-7, atol=1e-7)
    def loss(row, step): # of head 2 of layer 1
        z = torch.ones(3, 4, dtype=torch.float64)
        z[1, 2] += step
        with torch.no_grad(), hf.masked(model, z): return float(sum(each_loss(task, model(**row), row)))
    eps = 2e-2 if kind == 'llama' else 1e-3                                            # norms in float32 limit it in the Llama kind
    slopes = [(loss(row, -eps) - loss(row, eps)) / (2*eps) / len(losses) for row in cut(*[1] * 9)]
    found = [score(model, nine, method)[1, 2].item() for method in ('taylor', 'gradient')]
    assert found == pytest.approx([sum(slopes), sum(map(abs, slopes))], rel=1e-2 if kind == 'llama' else 1e-4, abs=1e-5)

def test_labels_that_are_missing_or_do_not_count():
    model, nine = made('bert', auto='AutoModelForMaskedLM'), NINE['masked'][3]
    with pytest.raises(ValueError, match='labels=-100: none counts'): mean_loss(model, nine | dict(labels=0*TOKENS - 100))
    with pytest.raises(ValueError, match='model=BertModel: no loss; give a model for CausalLM, '): mean_loss(model.base_model, nine)
    question = made('bert', auto='AutoModelForQuestionAnswering')
    with pytest.raises(ValueError, match='labels=None: there is no loss'): mean_loss(question, dict(input_ids=TOKENS, start_positions=CLASSES))

@pytest.mark.parametrize('kind', ['bert', 'gpt2'])
def test_sums_of_half_precision(kind): # what it says is that of the same weights in float64, but for the rounding of the model itself
    model, batches = for_scores(kind, dtype=torch.bfloat16)
    exact = copy.deepcopy(model).double()
    for p in exact.parameters(): assert torch.equal(p, p.bfloat16().double())
    with torch.no_grad(): out = torch.cat([(model(**x).logits if kind == 'bert' else model(**x).logits[:, :-1]).flatten(0, -2) for x in batches])
    y = torch.cat([(x['labels'] if kind == 'bert' else x['labels'][:, 1:]).flatten() for x in batches])
    assert mean_loss(model, batches) == pytest.approx(torch.nn.functional.cross_entropy(out.double(), y).item(), rel=1e-6)
    seen = []
    hooks = watching(model, lambda i, out: seen.append((i, out[real])))
    with torch.no_grad():
        for x in batches:
            real = x['attention_mask'].bool()
            model(**x)
    for hook in hooks: hook.remove()
    found = score(model, batches, 'output_difference')
    for i, (layer, *_, out) in enumerate(hf.attentions(model)):
        x = torch.cat([o for j, o in seen if i == j]).double().unflatten(-1, (4, -1))
        parts = torch.einsum('nhd,chd->nhc', x, hf.weight_rows(layer.get_submodule(out)).double().unflatten(-1, (4, -1)))
        torch.testing.assert_close(found[i].double(), (parts.square().sum((0, 2)) / parts.sum(1).square().sum()).sqrt(), rtol=1e-5, atol=0)
    want, count = torch.zeros(3, 4, dtype=torch.float64), 0
    def keep_grad(i, out): out.retain_grad(); outs.append(out)
    watching(model, keep_grad)
    for x in batches:
        outs = []
        logits = model(**{k: v for k, v in x.items() if k != 'labels'}).logits
        logits, y = (logits, x['labels']) if kind == 'bert' else (logits[:, :-1], x['labels'][:, 1:])
        torch.nn.functional.cross_entropy(logits.float().flatten(0, -2), y.flatten(), reduction='sum').backward()
        want -= torch.stack([(out.double() * out.grad.double()).unflatten(-1, (4, -1)).sum((0, 1, 3)) for out in outs])
        count += int((y != -100).sum())
    torch.testing.assert_close(score(model, batches, 'taylor').double(), want / count, rtol=1e-5, atol=1e-7)

def test_gates():
    model, gates = made('gpt2'), HeadGates(3, 4)
    gates.log_alpha.data = KEEP * 4. - 2                                                # 12 % and 88 % open
    with hf.gated(model, gates):
        a, b = hidden(model), hidden(model)
        model.train()
        c, d = hidden(model.train()), hidden(model)
        model.base_model(**batch('gpt2')).last_hidden_state.sum().backward()
    assert torch.equal(a, b) and not torch.equal(c, d) and gates.log_alpha.grad.abs().sum() > 0
    small = hf.remove_heads(model.eval(), gates)
    assert (hidden(small) - a).abs().max() < 1e-5 and not model.base_model._forward_pre_hooks
    with pytest.raises(ZeroDivisionError), hf.gated(model, gates): 1 / 0
    with pytest.raises(ValueError, match=r'gates=\(4, 3\): not \(layers, heads\)'), hf.gated(model, HeadGates(4, 3)): pass
    subset = SubsetGates(3, 4, keep=5)                                                  # a chosen number of heads
    with hf.gated(model.train(), subset):
        for _ in range(3): model.base_model(**batch('gpt2')).last_hidden_state.square().mean().backward()
    assert subset.log_alpha.grad.abs().sum() > 0 and sum(map(len, hf.remove_heads(model, subset).config.kept_heads)) == 5
    assert not model.base_model._forward_pre_hooks and model.config._attn_implementation == 'sdpa'

def test_gates_that_were_not_frozen_keep_as_many_as_they_promise():
    gates = TargetGates(3, 4, keep=5)                                                   # all twelve are open until then
    assert sum(map(len, hf.remove_heads(made('gpt2'), gates).config.kept_heads)) == 5 and not gates.frozen

@pytest.mark.parametrize('kind', KINDS)
def test_gates_and_gradient_checkpointing(kind):
    model, gates, grads = made(kind, dtype=torch.float64).train(), HeadGates(3, 4).double(), {}
    for p in model.modules():
        if isinstance(p, torch.nn.Dropout): p.p = 0.
    def passes(order): # two forward passes, each with a draw of its own, then the backward passes
        torch.manual_seed(1)
        for p in (*model.parameters(), *gates.parameters()): p.grad = None
        with hf.gated(model, gates):
            losses = [sum_of_squares(model, IDS), sum_of_squares(model, IDS.flip(1))]
            if order == 'sum': sum(losses).backward()
            else:
                for i in order: losses[i].backward()
        return [p.grad for p in (*model.base_model.parameters(), *gates.parameters())]
    want = passes('sum')
    assert want[-1].abs().sum() > 0
    model.gradient_checkpointing_enable({'use_reentrant': False})
    for order in ('sum', (0, 1), (1, 0)): torch.testing.assert_close(passes(order), want, rtol=1e-9, atol=1e-9)
    with hf.gated(model, gates): loss = sum_of_squares(model)
    with pytest.raises(torch.utils.checkpoint.CheckpointError): loss.backward()        # too late: said, not wrong
    model.gradient_checkpointing_enable({'use_reentrant': True})
    for given in (gates, None):
        with hf.gated(model, gates) if given else hf.masked(model, torch.ones(3, 4)):
            with pytest.raises(ValueError, match='use_reentrant=True: masks of heads have no gradient; give'): sum_of_squares(model)
            with torch.no_grad(): sum_of_squares(model)
    sum_of_squares(model.requires_grad_(True)).backward()                              # without masks, as before

@pytest.mark.parametrize('wrapped', ['compiled', 'parallel', 'both'])
def test_models_in_wrappers(wrapped):
    plain, batches = for_scores('bert')
    model = plain if wrapped == 'parallel' else torch.compile(plain)
    if wrapped != 'compiled': model = torch.nn.DataParallel(model)
    for method in METHODS: assert torch.equal(score(model, batches, method), score(plain, batches, method))
    for repair in REPAIRS.values():
        want = repair(plain, KEEP, batches).state_dict()
        found = repair(model, KEEP, batches).state_dict()
        assert {*found} == {*want} and all(torch.equal(x, want[k]) for k, x in found.items())
    assert mean_loss(model, batches, KEEP.float()) == mean_loss(plain, batches, KEEP.float())
    assert hf.shape(model) == (3, 4) and torch.equal(score(model, None, 'magnitude'), score(plain, None, 'magnitude'))
    with hf.gated(model, gates := HeadGates(3, 4)): sum_of_squares(plain.train()).backward()
    assert gates.log_alpha.grad.abs().sum() > 0
    with hf.masked(model, KEEP.float()): masked = hidden(plain.eval())
    assert (hidden(hf.remove_heads(model, KEEP)) - masked).abs().max() < 1e-5
    assert isinstance(plain.forward.__self__, transformers.BertForSequenceClassification)

def test_adapters_are_merged_first():
    class PeftModelForCausalLM(torch.nn.Module):
        def __init__(self): super().__init__(); self.base_model = made('gpt2')
        def merge_and_unload(self): return self.base_model
        def get_base_model(self): return self.base_model
    peft, message = PeftModelForCausalLM(), r'model=PeftModelForCausalLM: an adapter; merge it first: model.merge_and_unload\(\)'
    for ask in (lambda: hf.remove_heads(peft, KEEP), lambda: score(peft, [batch('gpt2')], 'entropy'), lambda: mean_loss(peft, [batch('gpt2')])):
        with pytest.raises(ValueError, match=message): ask()

def test_the_trainer(tmp_path):
    pytest.importorskip('accelerate')
    model, gates, seen = made('distilbert'), HeadGates(3, 4), []
    rows = [dict(input_ids=IDS[i % 3], attention_mask=torch.ones(9).long(), labels=torch.tensor(i % 2)) for i in range(48)]
    def penalty(gates, step):
        seen.append(step)
        return 100. * gates.l0()
    args = dict(per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=2, report_to=[], save_strategy='epoch', disable_tqdm=True, use_cpu=True)
    def train(callback):
        with hf.gated(model, gates):
            transformers.Trainer(model, transformers.TrainingArguments(str(tmp_path), **args), train_dataset=rows, callbacks=[callback]).train()
    train(hf.GateCallback(gates, penalty, 8, lr=.5))
    assert seen == [*range(8)] and gates.frozen and not gates.open_mask().any()       # nothing but the penalty counts: all are closed
    assert model.config._attn_implementation == 'sdpa' and not model.base_model._forward_pre_hooks
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path/'checkpoint-12')
    assert type(again) is type(model)                                                  # the whole model, in the middle of it
    small = hf.remove_heads(model.eval(), gates)
    trainer = transformers.Trainer(small, transformers.TrainingArguments(str(tmp_path/'small'), **args), train_dataset=rows)
    trainer.train()
    trainer.save_model(tmp_path/'saved')
    assert torch.equal(hidden(transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path/'saved')), hidden(small.eval()))

class Interrupted(Exception): pass

class At(transformers.TrainerCallback): # notes the gates of each checkpoint, and interrupts after one
    def __init__(self, gates, stop): self.gates, self.stop, self.seen = gates, stop, {}
    def on_save(self, args, state, control, **how):
        self.seen[state.global_step] = self.gates.log_alpha.detach().clone()
        if state.global_step == self.stop: raise Interrupted

def train_with_gates(folder, stop=None, resume=None, gates=None, with_gates=True, compute_metrics=None, **args): # 20 steps; everything is made anew
    torch.manual_seed(0)
    model, gates, target = made('distilbert'), gates or TargetGates(3, 4, keep=5), Target(7/12, warmup=4, rate=.05)
    rows = [dict(input_ids=row, labels=torch.tensor(i % 2)) for i, row in enumerate(torch.randint(3, 60, (80, 9), generator=torch.Generator().manual_seed(4)))]
    args = transformers.TrainingArguments(str(folder), **dict(max_steps=20, save_steps=2, report_to=[], disable_tqdm=True, use_cpu=True) | args)
    at = At(gates, stop)
    callbacks = [hf.GateCallback(gates, target, 14, lr=.2), at] if with_gates else [at]
    with hf.gated(model, gates):
        transformers.Trainer(model, args, train_dataset=rows, eval_dataset=rows[:8], callbacks=callbacks, compute_metrics=compute_metrics).train(resume_from_checkpoint=resume)
    return {f'{i} {name}': x for i, part in enumerate((model, gates, target)) for name, x in part.state_dict().items()}, gates, at.seen

@pytest.mark.parametrize('stop', [10, 16])                                             # before the gates are frozen, and after
def test_a_resumed_trainer_ends_with_the_same_bits(stop, tmp_path):
    pytest.importorskip('accelerate')
    want, gates, _ = train_with_gates(tmp_path/'whole')
    with pytest.raises(Interrupted): train_with_gates(tmp_path/'parts', stop)
    want = {name: x.clone() for name, x in want.items()}
    for given in (None, gates):                                                        # new ones, and such as are frozen already
        found, again, _ = train_with_gates(tmp_path/'parts', None, str(tmp_path/f'parts/checkpoint-{stop}'), given)
        assert {*found} == {*want} and all(torch.equal(x, want[name]) for name, x in found.items())
        assert again.frozen and int(again.open_mask().sum()) == 5 and not again.log_alpha.requires_grad
    assert want['2 lam'] != 0 and want['2 first'] > 0

def test_gates_that_cannot_be_resumed(tmp_path):
    pytest.importorskip('accelerate')
    with pytest.raises(Interrupted): train_with_gates(tmp_path, 4, with_gates=False)
    with pytest.raises(ValueError, match='resume_from_checkpoint: no gates in it; give one'): train_with_gates(tmp_path, resume=True)
    with pytest.raises(ValueError, match='restore_callback_states_from_checkpoint: .*; leave it out'): train_with_gates(tmp_path, restore_callback_states_from_checkpoint=True)

def test_the_best_model_comes_with_its_gates(tmp_path):
    pytest.importorskip('accelerate')
    values = iter(range(100))
    _, gates, seen = train_with_gates(tmp_path, compute_metrics=lambda _: dict(score=-abs(next(values) - 2)), eval_strategy='steps', eval_steps=2,
                                      load_best_model_at_end=True, metric_for_best_model='score')
    want = TargetGates(3, 4, keep=5)
    want.log_alpha.data = seen[6].clone()                                              # the third of the evaluations was the best
    assert gates.frozen and torch.equal(gates.log_alpha, want.freeze().log_alpha) and not torch.equal(gates.log_alpha, seen[20])

def test_versions():
    for old in ('4.57.1', '4.9'):
        with pytest.raises(ImportError, match='older than .*; pip install'): hf.check_version(old)
    for new in ('5.99.0.dev0', '6.0'):
        with pytest.warns(UserWarning, match='tested up to .*; run the tests'): hf.check_version(new)
    import warnings
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for tested in ('5.0.0', '5.24.0'): hf.check_version(tested) # the installed one may be newer: it warns, and the rest of this file tells

def tokenizer_of(name): # fast ones, with special tokens before and behind, behind, or none; slow ones
    if name in ('ByT5Tokenizer', 'CanineTokenizer'): return getattr(transformers, name)()
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    letters = Tokenizer(models.WordLevel({c: i for i, c in enumerate('?abcdefghijklmnopqrstuvwxyz <>')}, unk_token='?'))
    letters.pre_tokenizer = pre_tokenizers.Split('', 'isolated')
    specials = [('<', 28), ('>', 29)]
    if name != '$A': letters.post_processor = processors.TemplateProcessing(single=name, special_tokens=specials)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=letters, unk_token='?')

@pytest.mark.parametrize('name', ['$A', '< $A >', '< < $A', '$A >', 'ByT5Tokenizer', 'CanineTokenizer'])
def test_every_row_is_a_whole_example_of_its_tokenizer(name):
    tokenizer, text = tokenizer_of(name), 'the heads of a model <that> go ' * 9
    model = made('gpt2', auto='AutoModelForCausalLM', vocab_size=60_000)
    for length, tokens, batch in ((12, 10_000, 8), (12, 60, 3), (38, 10_000, 1)):
        parts = hf.text_batches(model, tokenizer, text, tokens, length=length, batch=batch)
        rows = torch.cat([x['input_ids'] for x in parts]).tolist()
        n = length - tokenizer.num_special_tokens_to_add()
        want = [tokenizer(text[i:i+n])['input_ids'] for i in range(0, len(text) - n + 1, n)] # all of them take each character for a token
        assert rows == want[:tokens // length] and all(len(row) == length for row in rows)
        assert all(len(x['input_ids']) <= batch and torch.equal(x['input_ids'], x['labels']) for x in parts)
    if not name.endswith('Tokenizer'):                                                 # as the tokenizer itself would cut
        found = tokenizer(text, truncation=True, max_length=length, return_overflowing_tokens=True)['input_ids']
        assert rows == [row for row in found if len(row) == length]
    k = tokenizer.num_special_tokens_to_add()
    for short, length in (('', 38), ('a' * (37 - k), 38), *([(text, k)] if k else [])):
        with pytest.raises(ValueError, match='text=.*: less than one piece of'): hf.text_batches(model, tokenizer, short, length=length)
