"Scores, masks and repairs where they can break: other kinds of models, whole layers gone, texts that are too short."
import copy, math
import pytest, torch
from allatt_prune.data import DataError
from allatt_prune.gates import HeadGates
from allatt_prune.importance import METHODS, attention_statistics, choose_heads, keep_mask, score
from allatt_prune.engine.checkpoint import build
from allatt_prune.model import LM, LMConfig
from allatt_prune.remove import remove_heads
from allatt_prune.repair import REPAIRS
from allatt_prune.targets import TargetGates
from allatt_prune.train import evaluate

KINDS = dict(plain={}, xl=dict(n_persistent=0, d_ff=16), words=dict(vocab=40, cutoffs=[10, 20]), memoryless=dict(mem_len=0), zeros=dict(zero_memory=True),
             short=dict(mem_len=3), long=dict(mem_len=20))
IDS = torch.randint(9, (600,), generator=torch.Generator().manual_seed(0)).numpy()

def model(**changes):
    torch.manual_seed(0)
    return build(LMConfig(**dict(vocab=9, n_layer=3, d_model=16, n_head=4, n_persistent=6, seg_len=8, mem_len=8) | changes))

@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('method', METHODS)
def test_every_method_scores_every_kind_of_model(kind, method):
    net = model(**KINDS[kind]).train()
    before = {k: x.clone() for k, x in net.state_dict().items()}
    found = score(net, IDS, method, batch=4)
    assert found.shape == (3, 4) and found.isfinite().all() and not found.requires_grad
    assert net.training and all(torch.equal(x, before[k]) for k, x in net.state_dict().items())     # looked at, not touched
    assert all(p.grad is None for p in net.parameters())
    assert torch.equal(found, score(net, IDS, method, batch=4))
    z = torch.ones(3, 4)
    z[1, 2] = 0
    assert score(net, IDS, method, z=z, batch=4).isinf().nonzero().tolist() == [[1, 2]]

def test_taylor_and_gradient_are_derivatives():
    net, ids, eps = model(mem_len=0).double(), IDS[:4*8*5 + 1], 1e-3                                 # without memory nothing is cut off
    def loss(i, h, step):
        z = torch.ones(3, 4, dtype=torch.float64)
        z[i, h] += step
        return evaluate(net, ids, z, batch=4)
    found = score(net, ids, 'taylor', batch=4)
    for i, h in ((0, 0), (1, 3), (2, 2)):
        assert found[i, h] == pytest.approx((loss(i, h, -eps) - loss(i, h, eps)) / (2*eps), rel=1e-3, abs=1e-6)
    assert (score(net, ids, 'gradient', batch=4) >= found.abs() - 1e-6).all()

def test_half_precision_and_double():
    for dtype in (torch.float64, torch.bfloat16):
        for method in METHODS: assert score(model().to(dtype), IDS, method, batch=4).isfinite().all(), (dtype, method)

@pytest.mark.parametrize('rounds', [1, 3, 12])
@pytest.mark.parametrize('per_layer', [False, True])
def test_as_many_heads_go_as_were_asked_for(rounds, per_layer):
    net = model()
    for sparsity in (0, .25, .5, .75):
        keep = choose_heads(net, IDS, 'taylor', sparsity, per_layer=per_layer, rounds=rounds, batch=4)
        assert int((~keep).sum()) == 12 * sparsity
        if per_layer: assert set((~keep).sum(1).tolist()) == {int(4 * sparsity)}
    with pytest.raises(ValueError, match='sparsity=.*: all heads would go'): choose_heads(net, IDS, 'taylor', 1., per_layer=per_layer, rounds=rounds, batch=4)

def test_the_highest_scores_stay():
    for seed in range(20):
        scores = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed))
        for sparsity in (.1, .37, .9):
            keep = keep_mask(scores, sparsity)
            assert int((~keep).sum()) == round(35 * sparsity) and scores[keep].min() > scores[~keep].max()
    assert keep_mask(torch.zeros(2, 3), .5).tolist() == [[True] * 3, [False] * 3]                   # equal ones: the first
    for bad in (math.nan, -.1, 1.01):
        with pytest.raises(ValueError, match='sparsity='): keep_mask(scores, bad)
    with pytest.raises(ValueError, match='scores='): keep_mask(torch.full((2, 2), math.nan), .5)

@pytest.mark.parametrize('kind', KINDS)
def test_repairs_of_whole_layers_and_of_nothing(kind):
    net = model(**KINDS[kind]).eval()
    whole, gone = torch.ones(3, 4).bool(), torch.ones(3, 4).bool()
    gone[1] = False
    for repair in REPAIRS.values():
        assert evaluate(repair(net, whole, IDS), IDS) == pytest.approx(evaluate(net, IDS), abs=1e-4)
        small = repair(net, gone, IDS)
        assert small.cfg.heads == [4, 0, 4] and math.isfinite(evaluate(small, IDS))

def test_texts_that_are_too_short():
    for method, said in (('gradient', '8 streams of one segment need 65'), ('leave_one_out', '8 streams of one segment need 65'), ('entropy', '8 streams with a full memory need 129')):
        with pytest.raises(ValueError, match=f'score_tokens=20: {said}'): score(model(), IDS[:20], method)
    for method, n in (('gradient', 65), ('leave_one_out', 65), ('entropy', 129)): assert score(model(), IDS[:n], method).isfinite().all()

def test_bad_input_is_named_and_the_model_left_in_its_mode():
    net, ones = model().train(), torch.ones(3, 4)
    small = REPAIRS['nothing'](net, torch.tensor([[1, 0, 0, 0]] * 3))
    for ask, said in ((lambda: score(net, IDS, 'taylor', batch=0), 'batch=0: not a number of streams'),
                      (lambda: score(net, IDS + 27, 'gradient'), 'corpus=text: symbol'),
                      (lambda: score(net, IDS[:20], 'entropy'), 'score_tokens=20'),
                      (lambda: score(net, IDS, None), 'method=None: unknown'),
                      (lambda: score(net, IDS, 'random', z=ones[:2]), r'z=\(2, 4\): not \(layers, heads\) = \(3, 4\)'),
                      (lambda: score(net, IDS, lambda *_: math.nan * ones), 'scores=.*: not a number'),
                      (lambda: keep_mask([[1., math.nan]], .5), 'scores=nan: not a number'),
                      (lambda: keep_mask(ones, '0.4'), 'sparsity=0.4: not a share'),
                      (lambda: choose_heads(net, 'never read', 'leave_one_out', 2.), 'sparsity=2.0: not a share'),
                      (lambda: score(net, IDS.astype(float), 'gradient'), 'text=float64: not ids'),
                      (lambda: score(net, IDS, 'leave_one_out', batch='8'), 'batch=8: not a number of streams'),
                      (lambda: attention_statistics(net, IDS, ['entropie']), 'statistic=entropie: unknown; give entropy'),
                      (lambda: remove_heads(net, ones - 2), 'keep=-1.0: not 0 or 1'),
                      (lambda: remove_heads(net, math.nan * ones), 'keep=nan: not a finite number'),
                      *((lambda repair=repair: REPAIRS[repair](net, .5 * ones, IDS), 'keep=0.5: not 0 or 1; give keep_mask') for repair in REPAIRS),
                      (lambda: attention_statistics(small, IDS), r'heads=\[1, 1, 1\]: heads were removed before'),
                      (lambda: REPAIRS['least_squares'](small, ones, IDS), 'heads=')):
        with pytest.raises((ValueError, DataError), match=said): ask()
        assert net.training
    assert score(net, IDS, lambda *_: [[1.] * 4] * 3).shape == (3, 4)

@pytest.mark.parametrize('repair', REPAIRS)
def test_masks_of_numbers_are_masks(repair):
    net, keep = model().eval(), [[1, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]]
    want = evaluate(REPAIRS[repair](net, torch.tensor(keep).bool(), IDS), IDS)
    for same in (keep, torch.tensor(keep), torch.tensor(keep).float()): assert evaluate(REPAIRS[repair](net, same, IDS), IDS) == want

def test_a_mask_alone_multiplies_by_one():
    net, keep = model().eval().double(), torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1]])
    want = evaluate(net, IDS, keep.double())
    for same in (keep, keep.bool(), keep.tolist()): assert evaluate(remove_heads(net, same), IDS) == pytest.approx(want, rel=1e-12)
    for gates, kept in ((HeadGates(3, 4), 12), (TargetGates(3, 4, keep=5), 5), (TargetGates(3, 4, keep=5, scale=False), 5)):
        small = remove_heads(net, gates.double())                                      # not frozen: their copy is
        z = copy.deepcopy(gates).freeze().eval()()
        assert sum(small.cfg.heads or [12]) == kept and evaluate(small, IDS) == pytest.approx(evaluate(net, IDS, z), rel=1e-12)
        assert not gates.frozen and gates.training

@pytest.mark.parametrize('wrapped', ['compiled', 'parallel', 'both'])
def test_models_in_wrappers(wrapped): # which nobody calls: that would compile
    plain = model().eval()
    net = plain if wrapped == 'parallel' else torch.compile(plain)
    if wrapped != 'compiled': net = torch.nn.DataParallel(net)
    keep = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1]]).bool()
    def same(a, b): return {*a.state_dict()} == {*b.state_dict()} and all(torch.equal(x, b.state_dict()[k]) for k, x in a.state_dict().items())
    for repair in REPAIRS.values(): assert same(repair(net, keep, IDS), repair(plain, keep, IDS))
    for method in METHODS: assert torch.equal(score(net, IDS, method, batch=4), score(plain, IDS, method, batch=4))
    assert torch.equal(choose_heads(net, IDS, 'taylor', .5), choose_heads(plain, IDS, 'taylor', .5))
    assert torch.equal(attention_statistics(net, IDS)['entropy'], attention_statistics(plain, IDS)['entropy'])

def test_a_score_from_outside_works_for_both_kinds_of_model():
    transformers = pytest.importorskip('transformers')
    gpt2 = transformers.AutoModelForCausalLM.from_config(transformers.GPT2Config(vocab_size=9, n_embd=16, n_layer=3, n_head=4, n_positions=40)).eval()
    def loudness(heads, z): # mean square of what each head puts out
        found = torch.zeros(z.shape)
        def look(i, x): found[i] += x.detach().unflatten(-1, (z.shape[1], -1)).square().sum((0, 2))
        heads.outputs(look)
        return found * z
    net, ids = model(mem_len=0).eval(), torch.as_tensor(IDS[:41])[None]
    seen, attend = [], net.layers[1].attn.attend
    net.layers[1].attn.attend = lambda *args, **how: seen.append(attend(*args, **how)) or seen[-1]
    found = score(net, IDS[:41], loudness, batch=1)
    torch.testing.assert_close(found[1], sum(x.detach().square().sum((0, 2, 3)) for x in seen))
    seen.clear()
    gpt2.transformer.h[1].attn.c_proj.register_forward_hook(lambda f, args, out: seen.append(args[0].detach()))
    found = score(gpt2, dict(input_ids=ids[:, :40]), loudness)
    torch.testing.assert_close(found[1], seen[0].unflatten(-1, (4, -1)).square().sum((0, 1, 3)))
    z = torch.ones(3, 4)
    z[1, 2] = 0
    assert score(gpt2, dict(input_ids=ids[:, :40]), loudness, z=z).isinf().nonzero().tolist() == [[1, 2]]
    keep = choose_heads(gpt2, [dict(input_ids=ids[:, :40])], loudness, .5)
    assert int(keep.sum()) == 6 and sum(map(len, REPAIRS['least_squares'](gpt2, keep, dict(input_ids=ids[:, :40])).config.kept_heads)) == 6
