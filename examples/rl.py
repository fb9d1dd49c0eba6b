"""Reinforcement learning: an actor and a critic with one optimizer in one state; or each on ranks of its own.

    torchrun --nproc-per-node 2 examples/rl.py runs/rl
    torchrun --nproc-per-node 3 examples/rl.py runs/rl-apart --apart

Together, every rank trains both models on games of its own, and the gradients are averaged. One State holds two models and
the optimizer over both. The games are another state on each rank, which `PerRank` says; so are the random generators,
without being told. Two more ranks, or one less, go on where these were: `reshape` deals the games anew.

Apart, the last rank trains the critic and the others the actor: two states in two runs, each saved by the ranks that hold it
(`ranks=`) without waiting for the others. After a kill one of them may be a save ahead, so the job agrees on a step that
both have, and resumes at that.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import holdfast

PLACES, GAMES, MOVES, DISCOUNT = 9, 16, 8, 0.9


class Corridor:
    """Games in a row of places: one step left or right, a reward at the right end, and from there back to the left."""

    def __init__(self) -> None:
        self.at = torch.zeros(GAMES, dtype=torch.int64)

    def move(self, right: Tensor) -> Tensor:
        """The rewards."""
        self.at = (self.at + 2 * right - 1).clamp(min=0)
        has_won = self.at == PLACES - 1
        self.at = torch.where(has_won, 0, self.at)
        return has_won.float()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"].clone()


def deal_anew(states: Sequence[dict[str, Any]], rank: int, world: int) -> dict[str, Any]:
    """The games of a rank from those of another number of ranks."""
    return states[rank % len(states)]


def network(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(PLACES, 16), nn.Tanh(), nn.Linear(16, outputs))


def play(actor: nn.Module, games: Corridor) -> tuple[Tensor, Tensor, Tensor]:
    """Places, one more than moves; the moves; the rewards."""
    places, moves, rewards = [games.at], [], []
    for _ in range(MOVES):
        with torch.no_grad():
            right = torch.distributions.Categorical(logits=actor(games.at)).sample()
        rewards.append(games.move(right))
        moves.append(right)
        places.append(games.at)
    return torch.stack(places), torch.stack(moves), torch.stack(rewards)


def returns(values: Tensor, rewards: Tensor) -> Tensor:
    """Discounted rewards, and after the last move what the critic says of the place."""
    found, ahead = [], values[-1]
    for reward in rewards.flip(0):
        ahead = reward + DISCOUNT * ahead
        found.append(ahead)
    return torch.stack(found).flip(0)


def policy_loss(actor: nn.Module, places: Tensor, moves: Tensor, advantages: Tensor) -> Tensor:
    drawn = torch.distributions.Categorical(logits=actor(places[:-1]))
    return -(drawn.log_prob(moves) * advantages).mean() - 0.01 * drawn.entropy().mean()


def train_together(run: str, total: int, every: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    actor, critic = (nn.parallel.DistributedDataParallel(network(outputs)) for outputs in (2, 1))
    optimizer = torch.optim.Adam([{"params": actor.parameters(), "lr": 3e-2}, {"params": critic.parameters(), "lr": 1e-1}])
    games = Corridor()
    torch.manual_seed(rank)  # each rank plays in its own way

    state = holdfast.State(
        actor=actor, critic=critic, optimizer=optimizer, games=holdfast.PerRank(games, reshape=deal_anew), rng="reseed"
    )
    with holdfast.Checkpointer(run, state, **saving(every)) as ckpt:
        start = ckpt.resume()
        print(f"rank {rank} of {world} resumed from step {start} of {total}, its games at {sum(games.at.tolist())}", flush=True)
        for step in range(start, total):
            places, moves, rewards = play(actor, games)
            values = critic(places).squeeze(-1)
            target = returns(values.detach(), rewards)
            advantages = target - values.detach()[:-1]
            loss = policy_loss(actor, places, moves, advantages) + (values[:-1] - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            reward = mean_over_ranks(rewards.mean())
            if rank == 0:
                print(f"step {step + 1} loss {loss.item():.6f} reward {reward:.4f}", flush=True)
            ckpt.step(step + 1, metrics={"reward": reward})


def train_apart(run: str, total: int, every: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    actors, critics = list(range(world - 1)), [world - 1]
    is_actor = rank in actors
    group = dist.new_group(actors)
    name, model = ("actor", network(2)) if is_actor else ("critic", network(1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2 if is_actor else 1e-1)
    games = Corridor()
    torch.manual_seed(rank)

    mine = {"model": model, "optimizer": optimizer}
    if is_actor:
        mine["games"] = holdfast.PerRank(games, reshape=deal_anew)
    state = holdfast.State(**mine, rng="reseed")
    ranks = actors if is_actor else critics
    step = common_step([f"{run}/actor", f"{run}/critic"])
    with holdfast.Checkpointer(f"{run}/{name}", state, ranks=ranks, **saving(every)) as ckpt:
        start = ckpt.resume(at=step)
        print(f"rank {rank} of {world} resumed the {name} from step {start} of {total}", flush=True)
        for step in range(start, total):
            # the actors tell the critic what they saw, and it tells them what that is worth
            places = torch.zeros(len(actors), MOVES + 1, GAMES, dtype=torch.int64)
            rewards = torch.zeros(len(actors), MOVES, GAMES)
            if is_actor:
                places[rank], moves, rewards[rank] = play(model, games)
            for told in (places, rewards):
                dist.all_reduce(told)
            values = torch.zeros(places.shape) if is_actor else model(places).squeeze(-1)
            heard = values.detach().clone()
            dist.broadcast(heard, critics[0])
            target = torch.stack([returns(v, r) for v, r in zip(heard, rewards, strict=True)])
            if is_actor:
                loss = policy_loss(model, places[rank], moves, (target - heard[:, :-1])[rank])
            else:
                loss = (values[:, :-1] - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if is_actor:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad, group=group)
                    parameter.grad /= len(actors)
            optimizer.step()
            if rank in (actors[0], critics[0]):
                print(f"{name} step {step + 1} loss {loss.item():.6f} reward {rewards.mean():.4f}", flush=True)
            ckpt.step(step + 1)


def common_step(runs: Sequence[str]) -> int | None:
    """The newest step that all the runs have; None where they are new. One rank looks, so that all know the same."""
    found: list[int | None] = [None]
    if dist.get_rank() == 0:
        committed = [{step.step for step in holdfast.Run(run).steps()} for run in runs]
        found[0] = max(set.intersection(*committed), default=None)
        if found[0] is None and any(committed):
            raise SystemExit(f"{' and '.join(runs)} have no step in common: one of them ended before its first save. Remove both")
    dist.broadcast_object_list(found)
    return found[0]


def saving(every: int) -> dict[str, Any]:
    return {"save": holdfast.Every(steps=every), "keep": holdfast.Keep(last=3), "deadline": "60s"}


def mean_over_ranks(value: Tensor) -> float:
    total = value.clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default="runs/rl", help="the directory of the run, new or not")
    parser.add_argument("--apart", action="store_true", help="the critic on the last rank, in a run of its own")
    parser.add_argument("--steps", type=int, default=100, help="train until this step")
    parser.add_argument("--every", type=int, default=5, help="steps between saves")
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train = train_apart if asked.apart else train_together
    train(asked.run, asked.steps, asked.every)
    dist.destroy_process_group()
