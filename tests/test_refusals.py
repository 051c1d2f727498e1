"What would give a wrong number in silence is refused in one line, also by `python -O`; what is accepted keeps its meaning."
import math, pickle, subprocess, sys
from dataclasses import replace
from pathlib import Path
import numpy as np, pytest, torch
from allatt_prune import HeadGates, LM, LMConfig, evaluate, get_recipe, remove_heads, text_for, train
from allatt_prune.config import Recipe
from allatt_prune.data import DataError
from allatt_prune.engine.text import from_text
from allatt_prune.distill import Distill
from allatt_prune.engine.checkpoint import build, shipped
from allatt_prune.engine.run import stored_recipe, way
from allatt_prune.importance import exact, keep_mask, score
from allatt_prune.model import AllAttention
from allatt_prune.targets import Target, TargetGates
from allatt_prune.training import TrainState, evaluating, train_steps

CFG = dict(vocab=10, n_layer=2, d_model=16, n_head=2, n_persistent=4, seg_len=8, mem_len=8)
TOY = get_recipe('tiny', n_layer=2, d_model=16, n_head=2, n_persistent=4, seg_len=8, mem_len=8, batch=2, steps=4, warmup=1,
                 prune_steps=4, prune_warmup=1, gate_steps=2, lam_warmup=1)
RHYME = 'one two buckle my shoe three four knock at the door ' * 40
IDS = np.arange(400) % 10

def make(**changes):
    torch.manual_seed(0)
    return build(LMConfig(**CFG | changes))

# settings

@pytest.mark.parametrize('given,kept', [(dict(eval_tokens=1e3), 1000), (dict(seed=0.), 0), (dict(lam=1), 1.), (dict(steps=np.int32(9)), 9),
                                        (dict(lr=np.float64(.5)), .5), (dict(corpus=Path('a')/'b'), 'a/b'), (dict(cutoffs=(3, 5.)), [3, 5]), (dict(cutoffs=np.array([3, 5])), [3, 5]),
                                        (dict(sparsity=None), None), (dict(gate_init=-2), -2.), (dict(prune_dropout=False), False)])
def test_a_setting_takes_its_type(given, kept):
    (name,) = given
    found = getattr(replace(TOY, **given), name)
    assert found == kept and type(found) is type(kept)

@pytest.mark.parametrize('wrong', [
    dict(steps=1.5), dict(steps='9'), dict(steps=True), dict(steps=None), dict(seed=-1), dict(lr=float('nan')), dict(lr=float('inf')), dict(lr=-1e-3),
    dict(lr='fast'), dict(prune_dropout=1), dict(prune_dropout='no'), dict(corpus=3), dict(unit='letter'), dict(optimizer='sgd'), dict(cutoffs=[1.5]),
    dict(cutoffs=3), dict(eval_tokens=1), dict(clip=0), dict(sparsity=1.2), dict(dropout=[.1]), dict(n_head=3), dict(heads=[2]), dict(heads=[3, 1]),
    dict(heads=[2, -1]), dict(heads=[2, True]), dict(heads=[]), dict(n_layer=10**9), dict(log_every=0), dict(batch=0), dict(gate_init=float('inf'))])
def test_a_setting_of_another_type_or_range(wrong):
    with pytest.raises(ValueError, match='|'.join(wrong)): replace(TOY, **wrong)

def test_recipes_of_older_folders():
    names = TOY.__dataclass_fields__
    old = {k: x for k, x in vars(TOY).items() if k in names} | dict(per_layer=False, sparsity=0.)
    assert Recipe.stored(old) == TOY
    with pytest.raises(TypeError, match='per_layer'): Recipe.stored(dict(per_layer=True))
    assert Recipe.stored(old | dict(repair='scaled')) == TOY                             # once the default, without effect on gates
    assert Recipe.stored(old | dict(repair='scaled', method='taylor')).repair == 'scaled' # such a run is continued as it was
    assert Recipe.stored(old | dict(method='sparsity')).method == 'gini'                 # its old name
    for name in shipped(): way(stored_recipe(name))                                      # older recipes too

def test_a_number_is_a_constant_learning_rate():
    assert [s.lr for s in train_steps(make(), CORPUS, TOY, lr=1e-4)] == [1e-4] * 4
    assert [s.lr for s in train_steps(make(), CORPUS, TOY, lr=0)] == [0] * 4     # not 'not given'

# ids and vocabularies

@pytest.mark.parametrize('wrong', [-100, -1, 10, 2**40])
def test_ids_that_the_model_does_not_have(wrong):
    ids = IDS.copy()
    ids[7] = wrong
    for job in (evaluate, lambda m, ids: score(m, ids, 'gradient'), lambda m, ids: score(m, ids, 'leave_one_out')):
        with pytest.raises(ValueError, match='the ids are 0 to 9'): job(make(), ids)

@pytest.mark.parametrize('batch', [0, -2])
def test_streams_that_there_cannot_be(batch):
    with pytest.raises(ValueError, match=f'batch={batch}'): evaluate(make(), IDS, batch=batch)

def test_a_text_of_another_vocabulary(tmp_path):
    ours, other = from_text(RHYME), from_text(RHYME.replace('b', 'p').replace('u', 'z')) # as many symbols
    assert len(ours.vocab) == len(other.vocab)
    model = LM(TOY.config(len(ours.vocab)))
    train(model, ours, TOY)
    pruned = remove_heads(model, [[1, 0], [1, 1]])
    model.save_pretrained(tmp_path/'model')
    for m in (model, pruned, model.with_config(mem_len=4), LM.from_pretrained(tmp_path/'model')):
        assert evaluate(m, ours.valid) > 0 and evaluate(m, np.asarray(other.valid)) > 0 # numbers without a vocabulary are taken as they are
        for refused in (lambda: evaluate(m, other.valid), lambda: evaluate(m, other.test[3:9]), lambda: train(m, other, TOY)):
            with pytest.raises(DataError, match='text_for'): refused()
        again = text_for(m, write(tmp_path, RHYME))
        assert again.hash == ours.hash and evaluate(m, again.valid) == evaluate(m, ours.valid)
    with pytest.raises(DataError, match='text_for'): score(model, other.train, 'gradient')
    with pytest.raises(DataError, match='corpus=text: .* symbols, not 10 as the model'): train(make(), ours, TOY)
    teacher = LM(TOY.config(len(ours.vocab)))
    train(teacher, other, TOY)
    with pytest.raises(DataError): train(model, ours, TOY, text_loss=Distill(teacher))
    with pytest.raises(ValueError, match='knows no vocabulary'): text_for(make(), 'pydocs')

def test_ids_know_their_vocabulary_after_pickling():
    ids, again = CORPUS.valid, pickle.loads(pickle.dumps(CORPUS))
    assert pickle.loads(pickle.dumps(ids[3:])).hash == again.valid.hash == CORPUS.hash and np.array_equal(again.valid, ids)

@pytest.mark.parametrize('vocab', [[], 'ab', dict(unit='char'), dict(unit='char', symbols=[1, 2]), dict(unit='char', symbols=3),
                                   dict(unit=['char'], symbols=['a', 'b']), dict(unit='letter', symbols=['a', 'b'])])
def test_a_vocabulary_of_another_type(tmp_path, vocab):
    make(vocab=2).save_pretrained(tmp_path/'model', vocab=vocab)
    with pytest.raises((OSError, ValueError), match='vocab|unit'): text_for(tmp_path/'model', write(tmp_path, RHYME))

def write(folder, text):
    (folder/'text.txt').write_text(text)
    return folder/'text.txt'

# modes and types

def modes(m): return {name: part.training for name, part in m.named_modules()}

@pytest.mark.parametrize('job', [
    lambda m: evaluate(m, IDS), lambda m: score(m, IDS, 'gradient'), lambda m: score(m, IDS, 'entropy'), lambda m: evaluating(m).__enter__(),
    lambda m: train(m, CORPUS, TOY), lambda m: train(m, CORPUS, TOY, HeadGates(2, 2)), lambda m: next(train_steps(m, CORPUS, TOY)),
    lambda m: Distill(m)(make(), *[torch.from_numpy(IDS.reshape(5, 80))] * 2, None, None)])
def test_every_module_keeps_its_mode(job):
    for whole in (True, False):
        m = make().train(whole)
        m.layers[0].train(not whole)
        before = modes(m)
        job(m)
        assert modes(m) == before

CORPUS = from_text('abcdefghij' * 40, 'raw')

def test_a_frozen_layer_has_no_dropout_while_others_train():
    m, seen = make(dropout=.5, attn_dropout=.5), []
    m.layers[0].eval()
    m.layers[0].register_forward_hook(lambda layer, *_: seen.append(layer.training))
    train(m, CORPUS, TOY)
    assert seen == [False] * 4

def test_a_model_made_from_another_keeps_modes_and_frozen_parameters():
    m = make()
    m.layers[1].eval().requires_grad_(False)
    for new in (remove_heads(m, [[1, 0], [1, 0]]), m.with_config(mem_len=4)):
        assert modes(new) == modes(m)
        assert {n: p.requires_grad for n, p in new.named_parameters()} == {n: p.requires_grad for n, p in m.named_parameters()}

@pytest.mark.parametrize('kind', [torch.bfloat16, torch.float16])
def test_gates_stay_wide(kind):
    torch.set_default_dtype(kind)
    try: born, target = TargetGates(2, 2, 3), Target(.5, 2, .1)
    finally: torch.set_default_dtype(torch.float32)
    def trained(gates):
        train(make(), CORPUS, replace(TOY, gate_lr=1e-3, lam=5.), gates)         # pi moves by a tenth of what 16 bits can tell from 2
        return gates.log_alpha
    for gates, plain in ((born, TargetGates(2, 2, 3)), (HeadGates(2, 2).to(kind), HeadGates(2, 2)), (torch.nn.Sequential(HeadGates(2, 2)).to(kind)[0], HeadGates(2, 2))):
        assert gates.frozen.dtype == torch.bool and torch.equal(trained(gates), trained(plain)) and (plain.log_alpha != 2).all()
    assert target.lam.dtype == target.first.dtype == torch.float32 and HeadGates(2, 2).double().log_alpha.dtype == torch.float64
    fine = HeadGates(1, 2)
    fine.log_alpha.data += 1e-6
    assert torch.equal(fine.log_alpha.clone(), fine.to(kind).log_alpha)          # not even rounded once

def test_a_device_without_float64():
    class Tensor: # of mps
        device = torch.device('mps')
        def cpu(self): return torch.ones(2)
    assert exact(Tensor()).dtype == torch.float64

# python -O

REFUSED = dict(
    mode=lambda: make().train().generate(torch.tensor([[1, 2]]), 3), temperature=lambda: make().eval().generate(torch.tensor([[1]]), 3, -1.),
    top_k=lambda: make().eval().generate(torch.tensor([[1]]), 3, top_k=-2), number=lambda: make().eval().generate(torch.tensor([[1]]), -3),
    prompt=lambda: make().eval().generate(torch.zeros(1, 0, dtype=torch.long), 3), nan=lambda: make().eval().generate(torch.tensor([[1]]), 3, float('nan')),
    heads=lambda: make(heads=[2]), cutoffs=lambda: LM(LMConfig(**CFG, cutoffs=[4])), memory=lambda: make()(torch.tensor([[1]]), mems=torch.randn(3, 1, 8, 16)),
    teacher=lambda: Distill(make())(make(mem_len=0), torch.tensor([[1]]), torch.tensor([[1]]), None, None),
    closed=lambda: keep_mask(torch.tensor([[1., 2, -math.inf, -math.inf]]), .25), share=lambda: keep_mask(torch.rand(2, 4), -.5),
    multiplier=lambda: remove_heads(make(), torch.ones(2, 2), torch.full((2, 2), float('nan'))),
    part=lambda: (lambda m: (m.layers.train(), m.generate(torch.tensor([[1]]), 3)))(make().eval()),
    costs=lambda: keep_mask(torch.tensor([[1., -math.inf]]), .25, costs=torch.tensor([1., 2])))

@pytest.mark.parametrize('name', REFUSED)
def test_refused(name):
    with pytest.raises(ValueError): REFUSED[name]()

def test_refused_without_assertions():
    code = 'from test_refusals import REFUSED\nfor name, f in REFUSED.items():\n    try: f()\n    except ValueError: print(name)'
    end = subprocess.run([sys.executable, '-O', '-c', code], capture_output=True, text=True, cwd=Path(__file__).parent, timeout=300)
    assert end.stdout.split() == [*REFUSED], end.stderr[-500:]

def test_a_state_belongs_to_its_model_and_gates():
    a, b, gates = make(), make(), HeadGates(2, 2)
    for model, mine, others in ((b, None, None), (a, gates, None), (a, None, gates)):
        state = TrainState.new(a, CORPUS, TOY, others)
        with pytest.raises(ValueError, match='state: of other'): next(train_steps(model, CORPUS, TOY, mine, state=state))
    with pytest.raises(TypeError): train(a, CORPUS, TOY, step=3)

def test_a_cache_is_refused_where_it_would_pass_a_forward_by():
    class Half(AllAttention):
        def forward(self, x, *rest): return (x + super().forward(x, *rest)) / 2
    other = LM(LMConfig(**CFG)).eval()
    other.layers[1].attn.attend = lambda *x, **how: x[0]
    for model in (LM(LMConfig(**CFG), attention=Half).eval(), other):
        with pytest.raises(ValueError, match='forward of its own'): model.generate(torch.tensor([[1, 2]]), 2)
