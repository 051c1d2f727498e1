"Writing: the same symbols as the whole forward pass, in operations that never wait for a device."
import pytest, torch
from torch.utils._python_dispatch import TorchDispatchMode
from allatt_prune import LM, HeadGates, remove_heads
from allatt_prune.config import LMConfig
from allatt_prune.engine.checkpoint import build
from allatt_prune.engine.generate import Writer
from allatt_prune.engine.report import samples

CFG = dict(vocab=27, n_layer=3, d_model=32, n_head=4, n_persistent=16, seg_len=8, mem_len=8)
SHAPES = {}, dict(heads=[3, 0, 1]), dict(d_ff=20), dict(n_persistent=0, d_ff=20), dict(mem_len=24), dict(cutoffs=[9, 18])

def made(**changes): # with biases that are not zero
    torch.manual_seed(0)
    model = build(LMConfig(**CFG | changes)).eval()
    for p in model.parameters(): p.data += torch.randn_like(p) / 5
    return model

@pytest.mark.parametrize('changes', SHAPES, ids=str)
@pytest.mark.parametrize('t', (1, 7, 8, 9, 40))
def test_the_same_symbols_as_the_whole_model(changes, t):
    model = made(**changes).double()
    text = model.generate(torch.randint(27, (3, t)), 50, temperature=0.)
    with torch.no_grad(): assert torch.equal(text[:, t:], model(text)[0][:, t-1:-1].argmax(-1))

def test_multipliers_write_as_the_pruned_model():
    model, text = made().double(), torch.randint(27, (2, 5))
    gates = HeadGates(3, 4)
    with torch.no_grad(): gates.log_alpha[:, ::2] = -9
    z = gates.freeze()().double()
    assert 0 < (z == 0).sum() < 12
    assert torch.equal(model.generate(text, 30, 0., z), remove_heads(model, z != 0, z).generate(text, 30, 0.))
    logits = model(text, z=z)[0][:, -1]
    assert (Writer(remove_heads(model, z != 0, z), text).logits - logits).abs().max() < 1e-12

class Operations(TorchDispatchMode):
    names = ()
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names += func.name(),
        return func(*args, **kwargs or {})

@torch.no_grad()
def test_a_step_compiles_as_one_graph_and_waits_for_nothing():
    model, text = made(), torch.randint(27, (2, 20))
    plain, compiled = Writer(model, text), Writer(model, text)
    step = torch.compile(compiled.step, backend='aot_eager', fullgraph=True)
    for ids in torch.randint(27, (12, 2)): assert torch.equal(plain.step(ids), step(ids))
    with Operations() as seen: plain.step(text[:, 0])
    assert not [n for n in seen.names if n.startswith(('aten::_local_scalar_dense', 'aten::nonzero', 'aten::is_nonzero', 'aten::masked_select'))]
    assert sum(n.startswith(('aten::bmm', 'aten::addmm', 'aten::mm')) for n in seen.names) <= 3 * 7 + 1 # products

class Text: # the beginning of a test text, in words, with the end of a line
    unit, test = 'word', list(range(9))
    def decode(self, ids): return 'the man <eos> said that he'

def test_a_sample_marks_its_prompt():
    model = LM.from_pretrained('tiny-books-word')
    said = samples(dict(baseline=model), Text(), 5)['baseline']
    assert said.startswith('[the man \n said that he] ') and said.replace('[', '').replace(']', '') == model.write('the man <eos> said that he', 5)
