"Exported models, opened without this package's classes: other kinds of models, whole layers gone, every way to cut a text; and the command."
import os
import pytest, torch
from allatt_prune.export import FORMATS, empty_memory, export, int8
from allatt_prune.gates import HeadGates
from allatt_prune.model import LM, LMConfig
import forks

KINDS = dict(plain={}, uneven=dict(heads=[4, 0, 1]), nothing=dict(heads=[0, 0, 0]), xl=dict(n_persistent=0, d_ff=16), words=dict(vocab=40, cutoffs=[10, 20]),
             memoryless=dict(mem_len=0), zeros=dict(zero_memory=True), short=dict(mem_len=3), one=dict(mem_len=1), bare=dict(final_norm=False))
IDS = torch.randint(9, (3, 40), generator=torch.Generator().manual_seed(0))

def model(**changes):
    torch.manual_seed(0)
    return LM(LMConfig(**dict(vocab=9, n_layer=3, d_model=16, n_head=4, n_persistent=6, seg_len=8, mem_len=8) | changes)).eval()

def opened(path): # a function of ids and memory
    if path.suffix == '.pt2': return torch.export.load(path).module()
    onnxruntime = pytest.importorskip('onnxruntime')
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options)
    return lambda ids, mems: [torch.from_numpy(x) for x in session.run(None, dict(ids=ids.numpy(), mems=mems.numpy()))]

def agree(read, net, batch, pieces):
    mems, theirs, ids = empty_memory(net, batch), None, IDS[:batch]
    if net.cfg.mem_len == 1: mems = mems.new_zeros(3, batch, 1, 16)                    # its length is fixed
    theirs = mems if net.cfg.mem_len == 1 else None
    for piece in ids.split(pieces, 1):
        logits, mems = read(piece, mems)
        want, theirs = net(piece, mems=theirs)
        torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-4)
        if theirs is not None: torch.testing.assert_close(mems, theirs, atol=1e-4, rtol=1e-4)

@pytest.mark.parametrize('format', FORMATS)
@pytest.mark.parametrize('kind', KINDS)
def test_every_kind_of_model_reads_as_before(kind, format, tmp_path):
    if format == 'onnx': pytest.importorskip('onnxscript')
    net = model(**KINDS[kind])
    export(net, tmp_path/f'm.{format}', format)
    read = opened(tmp_path/f'm.{format}')
    for batch, pieces in ((3, 8), (1, 40), (2, [2, 1, 1, 20, 16])): agree(read, net, batch, pieces)

def test_one_byte_per_weight_is_the_same_program_with_rounded_weights(tmp_path):
    net = model(heads=[4, 0, 1])
    small = int8(net)
    before = dict(net.named_parameters())
    for layer, rounded in zip(net.layers, small.layers):
        if layer.attn is None: continue
        w, q = layer.attn.pk, rounded.attn.pk
        assert 0 < (w - q).abs().max() <= w.abs().max() / 127 and (q.abs().amax(-1) - w.abs().amax(-1)).abs().max() < 1e-6
    assert all(p is before[k] and p.requires_grad for k, p in net.named_parameters())               # a copy
    export(small, tmp_path/'m.pt2')
    agree(opened(tmp_path/'m.pt2'), small, 2, 8)

def test_a_file_says_nothing_of_the_machine(tmp_path):
    export(model(), tmp_path/'m.pt2')
    assert os.path.dirname(torch.__file__).encode() not in (tmp_path/'m.pt2').read_bytes()

def command(*args, cwd): return forks.command('export', *args, cwd=cwd)

def test_the_command(tmp_path):
    gates = HeadGates(3, 4)
    with torch.no_grad(): gates.log_alpha[1] = -1
    net = model(vocab=27)
    net.save_pretrained(tmp_path/'gated', gates=gates.state_dict())
    done = command('gated', '--file', 'g.pt2', cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, '') and done.stdout.startswith('g.pt2: '), done.stderr
    z = HeadGates.from_pretrained(tmp_path/'gated')()
    torch.testing.assert_close(opened(tmp_path/'g.pt2')(IDS, empty_memory(net, 3))[0], net(IDS, z=z)[0], atol=1e-4, rtol=1e-4)
    before = sorted(tmp_path.iterdir())
    for args, status, said in (((), 2, 'model'), (('gated', '--file', 'g.pt2'), 1, 'file=g.pt2: exists; choose another name'),
                               (('gated', '--format', 'gguf'), 2, 'format=gguf: unknown; give pt2 or onnx'),
                               (('gated', '--file', 'no/m.pt2'), 1, 'file=no/m.pt2: its folder does not exist; make it'), (('none',), 1, 'checkpoint=none: not found')):
        done = command(*args, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr.count('\n')) == (status, '', 1) and said in done.stderr, done.stderr
    assert sorted(tmp_path.iterdir()) == before
