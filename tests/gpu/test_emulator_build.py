"""The build of the emulator, after one that was killed."""

import multiprocessing

import emulated


def _hold(folder, begun):
    with emulated.alone(folder):
        (folder / "lock").touch()  # as torch does while it builds
        begun.set()
        multiprocessing.Event().wait()


def test_the_lock_of_a_killed_build_is_no_obstacle(tmp_path):
    context = multiprocessing.get_context("spawn")
    begun = context.Event()
    builder = context.Process(target=_hold, args=(tmp_path, begun))
    builder.start()
    assert begun.wait(60)
    builder.kill()
    builder.join()
    assert (tmp_path / "lock").exists()
    with emulated.alone(tmp_path):
        assert not (tmp_path / "lock").exists()
