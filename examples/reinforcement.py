"""Reinforcement learning: a policy acts on the CPU, and learns on the device.

Acting is a few small operations and a read, over and over: the CPU does that without waiting for anything.
Learning is one large step over whole episodes, which ltc compiles. The game: a cart at a random place is
pushed left or right until it stands in the middle.
"""

import copy

import torch
from on_both import mark_step, on_both, options
from torch import nn

GAMES, MOVES = 32, 24


def play(policy: nn.Module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Play games side by side on the CPU; return their states, actions and rewards to come."""
    place, speed = torch.rand(GAMES) * 2 - 1, torch.zeros(GAMES)
    states, actions, rewards = [], [], []
    with torch.no_grad():
        for _ in range(MOVES):
            state = torch.stack([place, speed], 1)
            action = policy(state).softmax(1).multinomial(1).squeeze(1)
            speed = 0.8 * speed + 0.1 * (2.0 * action - 1)
            place = (place + speed).clamp(-2, 2)
            states.append(state), actions.append(action), rewards.append(-place.abs())
    to_come = torch.stack(rewards).flip(0).cumsum(0).flip(0)
    return torch.cat(states), torch.cat(actions), to_come.flatten()


def train(device: str, rounds: int, width: int) -> str:
    """Return the mean reward of the first and the last games."""
    layers = nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
    actor = nn.Sequential(*layers)
    learner = copy.deepcopy(actor).to(device)
    optimizer = torch.optim.Adam(learner.parameters(), lr=3e-3)
    means = []
    for _ in range(rounds):
        states, actions, to_come = play(actor)
        means.append(to_come.view(MOVES, GAMES)[0].mean().item())
        advantage = (to_come - to_come.mean()) / to_come.std()
        optimizer.zero_grad()
        chosen = learner(states.to(device)).log_softmax(1)
        chosen = chosen.gather(1, actions.to(device)[:, None]).squeeze(1)
        (-(chosen * advantage.to(device)).mean()).backward()
        optimizer.step()
        mark_step(device)
        actor.load_state_dict(learner.state_dict())  # copied to the CPU, once in a round
    return f"reward {means[0]:.1f} at first, {sum(means[-5:]) / 5:.1f} at last"


if __name__ == "__main__":
    on_both(train, **options(__doc__, rounds=150, width=128))
