"The script for a GPU runs from end to end on a CPU, where its times mean nothing."
import json, os, subprocess, sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent/'nbs'/'results'/'gpu'/'half_the_time.py'
PARTS = ['right', 'card', 'host', 'heads', 'dropout', 'writing', 'tiles', 'compiled', 'peers'] # the most important first

def rehearse(out, *args):
    subprocess.run([sys.executable, SCRIPT, out, '--rehearse', *args], check=True, cwd=out.parent, env=os.environ | dict(OMP_NUM_THREADS='1'))
    return json.loads(out.read_text())

def test_rehearsal(tmp_path):
    found = rehearse(tmp_path/'out.json')
    assert list(found['parts']) == PARTS and {*found['predicted']} <= {*PARTS} and 'commit' in found['environment']
    for name, part in found['parts'].items():
        assert part['rows'] and not 'error' in part and not any('error' in row for row in part['rows']), (name, part)
    for row in found['parts']['right']['rows']: assert max(row.get('errors', [row.get('worst')])) < 1e-4
    shapes = {(r['recipe'], r['job'], r['how']) for name in ('heads', 'compiled') for r in found['parts'][name]['rows']}
    assert shapes == {(r, j, h) for r in ('text8', 'wt103') for j in ('train', 'read') for h in ('eager', 'captured', 'compiled')}

def test_what_there_is_no_time_for_is_left_out(tmp_path):
    assert [*rehearse(tmp_path/'out.json', '--seconds', '0')['parts']] == []
    assert [*rehearse(tmp_path/'out.json', '--parts', 'card')['parts']] == ['card']
