"What a folder of checkpoints must survive: strangers' files in it, links, killed writers."
import os, shutil
from pathlib import Path
import pytest, torch
from allatt_prune.engine.checkpoint import newest, save, save_step, sweep, verify, write_file

def state(folder):
    def content(p): return os.readlink(p) if p.is_symlink() else p.read_bytes() if p.is_file() else None
    return {str(p.relative_to(folder)): content(p) for p in sorted(folder.rglob('*'))}

def steps(folder, *numbers, phase='gated'):
    for n in numbers: save_step(folder, phase, n, dict(step=n), model=dict(x=torch.full((9,), float(n))))

def names(folder): return sorted(p.name for p in folder.iterdir())

# ---- what is deleted, and what is not

def test_only_what_we_wrote_is_deleted(tmp_path):
    here, outside = tmp_path/'checkpoints', tmp_path/'outside'
    steps(here, 10), steps(outside, 7)
    (outside/'letter').write_text('precious')
    ours = {k for k in state(here)}
    (here/'photos-2024').mkdir()
    (here/'photos-2024'/'me.jpg').write_bytes(b'precious')
    (here/'letters-1999').symlink_to(outside)                              # a name like ours, and a link
    (here/'gated-00000007').symlink_to(outside/'gated-00000007')           # even a checkpoint of ours, but a link
    shutil.copytree(here/'gated-00000010', here/'backup-00000010')
    (here/'.notes.tmp-0a1b2c3d').mkdir()
    (here/'.notes.tmp-0a1b2c3d'/'mine').write_text('precious')             # a name like that of what a killed writer leaves
    (here/'.link.tmp-allatt_prune-0a1b2c3d').symlink_to(outside)
    (here/'gated-00000002').write_text('a file')
    os.mkdir(here/'gated-00000003')
    os.mkfifo(here/'gated-00000003'/'config.json')                         # whoever reads it waits for ever
    shutil.copy(here/'gated-00000010'/'manifest.json', here/'gated-00000003')
    before, theirs = state(outside), {k: v for k, v in state(here).items() if k not in ours}
    steps(here, 200, 300, 400)
    steps(here, 0, 100, 200, phase='later')
    after = state(here)
    assert state(outside) == before and theirs.items() <= after.items()
    assert {k.split('/')[0] for k in after.keys() - theirs.keys()} == {f'{x}00' for x in ('gated-000003', 'gated-000004', 'later-000001', 'later-000002')}
    assert newest(here, 'gated')[0]['step'] == 400

def added(folder): (folder/'notes.txt').write_text('precious')
def removed(folder): (folder/'model.safetensors').unlink()

@pytest.mark.parametrize('change', (added, removed))
def test_a_checkpoint_that_somebody_changed_is_kept(tmp_path, change):
    steps(tmp_path, 100)
    change(tmp_path/'gated-00000100')
    before = state(tmp_path)
    steps(tmp_path, 200, 300, 400)
    assert before.items() <= state(tmp_path).items() and 'gated-00000200' not in names(tmp_path)

def test_a_link_to_a_checkpoint_of_that_name(tmp_path):
    here, outside = tmp_path/'here', tmp_path/'outside'
    steps(outside, 100)
    before = state(outside)
    here.mkdir()
    (here/'gated-00000100').symlink_to(outside/'gated-00000100')
    with pytest.raises(FileExistsError): steps(here, 100)
    assert state(outside) == before and (here/'gated-00000100').is_symlink()

def test_sweeping(tmp_path):
    mine = '.a.tmp-0a1b2c3d', '.a.tmp-allatt_prune-mine', 'a.tmp-allatt_prune-0a1b2c3d', '.a.tmp-allatt_prune-0a1b2c3d.txt'
    for name in mine: (tmp_path/name).write_text('precious')
    (tmp_path/'.gated-00000001.tmp-allatt_prune-0a1b2c3d').mkdir()
    (tmp_path/'.gated-00000001.tmp-allatt_prune-0a1b2c3d'/'config.json').write_text('half')
    (tmp_path/'.report.md.tmp-allatt_prune-0a1b2c3d').write_text('half')
    save(tmp_path/'x', {})                                                 # another writer may be at work
    assert len(names(tmp_path)) == len(mine) + 3
    sweep(tmp_path)
    verify(tmp_path/'x')
    assert names(tmp_path) == sorted((*mine, 'x'))

@pytest.mark.parametrize('half', (False, True))
def test_killed_while_an_old_one_is_deleted(tmp_path, monkeypatch, half):
    class Killed(BaseException): pass
    def killed(path, **_):
        if not path.exists(): return                                       # of a folder that has got its name
        if half: (path/'config.json').unlink()
        raise Killed
    steps(tmp_path, 100, 200)
    with monkeypatch.context() as m:
        m.setattr(shutil, 'rmtree', killed)
        with pytest.raises(Killed): steps(tmp_path, 300)
    assert newest(tmp_path, 'gated')[0]['step'] == 300
    for p in tmp_path.glob('gated-*'): verify(p)                           # none has a name and is not whole
    steps(tmp_path, 400)
    assert names(tmp_path) == ['gated-00000300', 'gated-00000400']

# ---- files

def test_no_file_is_written_through_a_link(tmp_path):
    (tmp_path/'precious').write_text('precious')
    for name, target in (('report.md', 'precious'), ('dangling.md', 'nowhere')):
        (tmp_path/name).symlink_to(tmp_path/target)
        write_file(tmp_path/name, b'new')
        assert not (tmp_path/name).is_symlink() and (tmp_path/name).read_bytes() == b'new'
    assert (tmp_path/'precious').read_text() == 'precious' and not (tmp_path/'nowhere').exists()
    (tmp_path/'folder').mkdir()
    with pytest.raises(OSError): write_file(tmp_path/'folder', b'new')
    assert names(tmp_path) == ['dangling.md', 'folder', 'precious', 'report.md'] # and no temporary file is left

@pytest.mark.parametrize('mask', (0o077, 0o002))
def test_umask_is_respected(tmp_path, mask):
    old = os.umask(mask)
    try:
        save(tmp_path/'model', dict(a=1), model=dict(x=torch.ones(2)))
        write_file(tmp_path/'file', b'x')
    finally: os.umask(old)
    for p in tmp_path.rglob('*'): assert p.stat().st_mode & 0o777 == (0o777 if p.is_dir() else 0o666) & ~mask, p

def test_all_is_on_the_disk_before_a_folder_gets_its_name(tmp_path, monkeypatch):
    steps(tmp_path, 100, 200)
    done, fsync, replace, rename = [], os.fsync, os.replace, os.rename
    monkeypatch.setattr(os, 'fsync', lambda fd: (done.append(Path(os.readlink(f'/proc/self/fd/{fd}'))), fsync(fd)))
    for name, f in dict(replace=replace, rename=rename).items():
        monkeypatch.setattr(os, name, lambda a, b, f=f: (f(a, b), done.append((Path(a), Path(b).name))))
    steps(tmp_path, 300)
    at = next(i for i, x in enumerate(done) if isinstance(x, tuple) and x[1] == 'gated-00000300')
    tmp, _ = done[at]
    written = {p.name for p in done[:at] if isinstance(p, Path) and p.parent == tmp} # the manifest had another name
    assert {'config.json', 'model.safetensors'} < written and len(written) == 3 and done[at-1] == tmp
    assert done[at+1] == tmp_path and done[at+2][0].name == 'gated-00000100' # the name was there before an old one went
