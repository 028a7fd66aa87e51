"""klfast in every worker of a verl training under Ray: a hook that Ray calls as a worker starts.

Put this file where the workers can import it, and name the function on verl's command line::

    python -m verl.trainer.main_ppo \
        +ray_kwargs.ray_init.runtime_env.worker_process_setup_hook=verl_ray_hook.patch_verl \
        actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=k3+ ...

verl merges ``ray_kwargs.ray_init`` into its ``ray.init``. A worker says on its standard output what
was replaced.
"""

import klfast


def patch_verl():
    """Patch verl in this process, and say what was replaced."""
    try:
        print(klfast.compat.patch("verl"), flush=True)
    except klfast.compat.PatchError as error:
        print(f"klfast left verl as it is: {error}", flush=True)
        raise


if __name__ == "__main__":
    import importlib.util

    if importlib.util.find_spec("verl") is None:
        print("verl is not installed here: nothing to patch")
    else:
        patch_verl()
