"The command `time` in a process of its own: at small size all that it does on a GPU, and what it refuses."
import json, shutil, subprocess, sys
import pytest, torch
from allatt_prune.cli import main

SMALL = '--n-layer 1 --d-model 32 --n-head 4 --n-persistent 16 --seg-len 16 --mem-len 16 --batch 2 --repeats 2 --warmup 1 --corpus own.txt'.split()

def command(*args, cwd): return subprocess.run([sys.executable, '-m', 'allatt_prune', 'time', *args], cwd=cwd, capture_output=True, text=True, timeout=1800)

@pytest.fixture
def folder(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.setenv('ALLATT_PRUNE_CACHE', str(tmp_path_factory.mktemp('cache')))
    (tmp_path/'own.txt').write_text('tick tock goes the clock on the wall ' * 60)
    (tmp_path/'taken.json').write_text('precious')
    return tmp_path

def test_the_gpu_benchmark_runs_on_a_cpu_at_small_size(folder):
    compiler = shutil.which('g++') or shutil.which('clang++')
    done = command(*SMALL, *'--recipe wt103 text8 --kept 0.75 0.5 --dtype bfloat16 --json out.json'.split(), cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads((folder/'out.json').read_text())
    assert found['environment']['torch'] == torch.__version__ and [s['recipe'] for s in found['shapes']] == ['wt103', 'text8']
    for shape in found['shapes']:
        assert shape['error'] < 1e-2 and all(r['ms'] > 0 for r in shape['rows'])
        at = {(r['job'], r['attend'], r['heads']): r for r in shape['rows']}
        assert at['train', 'plain', 4]['mb'] > at['read', 'plain', 4]['mb'] > at['read', 'fused', 2]['mb'] > 0
        assert f"- train, fused: share of the roofline: {shape['ratios']['train, fused: share of the roofline']:.3f}" in done.stdout
    if compiler:
        done = command(*SMALL, *'--kept 0.5 --compile --json compiled.json'.split(), cwd=folder)
        assert done.returncode == 0, done.stderr
        assert 'train, dropout, fused compiled: times as fast as plain' in json.loads((folder/'compiled.json').read_text())['shapes'][0]['ratios']

REFUSED = [ # arguments, exit status, what the line must name
    ('--repeats 0', 2, 'repeats=0'), ('--repeats -1', 2, 'repeats=-1'), ('--repeats many', 2, 'repeats=many'),
    ('--warmup 0', 2, 'warmup=0'), ('--kept 1.01', 2, 'kept=1.01'), ('--kept -0.1', 2, 'kept=-0.1'), ('--kept nan', 2, 'kept=nan'),
    ('--kept half', 2, 'kept=half'), ('--kept 1', 2, 'kept=[1.0]'), ('--kept 0.5 0.5', 2, 'kept=[0.5, 0.5]'),
    ('--kept 4,4', 2, 'kept=[4, 4]'), ('--kept 5,', 2, 'kept=5,'), ('--recipe huge', 2, 'recipe=huge'),
    ('--device cuda:99', 2, 'device=cuda:99'), ('--dtype int8', 2, 'dtype=int8'), ('--lam 1', 2, 'argument=--lam'), ('--n-head 7', 2, '--n-head=7'),
    ('--json taken.json', 1, 'json=taken.json'), ('--json no/such.json', 1, 'json=no/such.json'), ('--json own.txt/x', 1, 'json=own.txt/x'),
    ('--batch 900', 1, 'corpus=own.txt'), ('--corpus no.txt', 1, 'corpus=no.txt'), ('surplus', 2, 'surplus')]
if not torch.cuda.is_available(): REFUSED.append(('--device cuda', 2, 'device=cuda'))

@pytest.mark.parametrize('args,status,named', REFUSED, ids=[a for a, *_ in REFUSED])
def test_refused_in_one_line_and_nothing_written(folder, monkeypatch, capfd, args, status, named): # in this process, which has torch loaded already
    before = {p: p.read_bytes() for p in folder.iterdir()}
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as end: main(['time', *SMALL, *args.split()])
    out, err = capfd.readouterr()
    assert (end.value.code, out) == (status, '')
    assert err.startswith('allatt-prune: error: ') and err.count('\n') == 1 and named in err and '; ' in err
    assert {p: p.read_bytes() for p in folder.iterdir()} == before
