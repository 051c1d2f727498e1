"Hugging Face models where they can break: every architecture, uneven and empty layers, both attention functions, caches, folders."
import copy, subprocess, sys
import pytest, torch
transformers = pytest.importorskip('transformers')
from allatt_prune import hf
from allatt_prune.gates import HeadGates

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

def config(kind, **changes): return transformers.CONFIG_MAPPING[kind](**KINDS[kind] | changes)

def made(kind, how='sdpa', dtype=torch.float32, auto='AutoModelForSequenceClassification', **changes):
    torch.manual_seed(0)
    model = getattr(transformers, auto).from_config(config(kind, **changes), attn_implementation=how).to(dtype).eval()
    for p in model.parameters(): torch.nn.init.normal_(p, std=.2)                      # biases and norms, too
    if kind == 'gpt2' and auto != 'AutoModelForCausalLM': model.config.pad_token_id = 0
    return model

def batch(kind): return dict(input_ids=IDS * PAD, attention_mask=PAD)

def hidden(model, **how): # of tokens that are there
    with torch.no_grad(): return model.base_model(**batch(None), **how).last_hidden_state[PAD.bool()]

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

@pytest.mark.parametrize('kind', KINDS)
def test_without_the_mask_of_padding_it_would_show(kind): # the trap of the interface for masks
    model, long = made(kind), torch.cat([IDS[:, :4], IDS[:, :5]], 1)
    with hf.masked(model, KEEP.float()), torch.no_grad():
        short = model.base_model(input_ids=IDS[:, :4]).last_hidden_state
        padded = model.base_model(input_ids=long, attention_mask=torch.tensor([[1] * 4 + [0] * 5] * 3)).last_hidden_state[:, :4]
    assert (short - padded).abs().max() < 1e-5

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
    refused('z=.nan.: not a finite number', hf.remove_heads, bert, keep, torch.where(keep, torch.nan, 0.))
    flex = made('bert')
    flex.config._attn_implementation = 'flex_attention'
    refused('attn_implementation=flex_attention: cannot be masked; give eager or sdpa', enter, flex, keep)
    for bad in (None, [[0]] * 2, [[0]] * 4, [[4], [], []], [[1, 0], [], []], [[0, 0], [], []], [0, 1, 2], 'all', [['0'], [], []]):
        small.config.kept_heads = bad
        refused('kept_heads=.*: not the numbers of kept heads, up to 3, in 3 layers', type(small), small.config)

def test_a_removed_model_is_a_model_like_any_other(tmp_path):
    model = made('distilbert').train()
    model.distilbert.embeddings.word_embeddings.weight.requires_grad_(False)
    small = hf.remove_heads(model, KEEP)
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
    assert 'LlamaForCausalLM with 4 of 12 attention heads' in card and '| 1 | 3 of 4 | 0, 2, 3 |' in card and '| 0 | 0 of 4 | none |' in card
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
