"""Two agents of cleanrl's, which act in an environment, and the watch of all programs."""

from __future__ import annotations

import itertools
import random
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F


class Watch(Protocol):
    """Receives the beginning and the steps of a program."""

    def begin(self) -> None: ...

    def step(self, loss: torch.Tensor | float) -> None: ...


def dqn(device: str, watch: Watch) -> None:
    """Train as cleanrl's DQN does; a step is ten of the environment, and an update."""
    import gymnasium
    import numpy as np

    environment = gymnasium.make("CartPole-v1")
    draws = random.Random(0)
    network = nn.Sequential(
        nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 2)
    ).to(device)
    target = nn.Sequential(
        nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 2)
    ).to(device)
    target.load_state_dict(network.state_dict())
    optimizer = torch.optim.Adam(network.parameters(), lr=2.5e-4)
    kept: list[tuple[Any, ...]] = []
    seen, _ = environment.reset(seed=1)

    def batch_of(size: int) -> list[torch.Tensor]:
        chosen = draws.choices(kept, k=size)
        return [torch.as_tensor(np.stack(part)).to(device) for part in zip(*chosen)]

    watch.begin()
    for number in itertools.count(1):
        if draws.random() < 0.1:
            action = draws.randrange(2)
        else:
            values = network(torch.Tensor(seen[None]).to(device))
            action = int(torch.argmax(values, dim=1).cpu().numpy()[0])
        following, reward, ended, cut, _ = environment.step(action)
        kept.append((seen, following, np.int64(action), np.float32(reward), np.float32(ended)))
        seen = environment.reset()[0] if ended or cut else following
        if number % 10:
            continue
        before, behind, actions, rewards, dones = batch_of(128)
        with torch.no_grad():
            best, _ = target(behind).max(dim=1)
            wanted = rewards.flatten() + 0.99 * best * (1 - dones.flatten())
        old = network(before).gather(1, actions[:, None]).squeeze()
        loss = F.mse_loss(wanted, old)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number % 500 == 0:
            for theirs, ours in zip(target.parameters(), network.parameters()):
                theirs.data.copy_(1.0 * ours.data + 0.0 * theirs.data)
        watch.step(loss)


def layer(inputs: int, outputs: int, gain: float = 2**0.5) -> nn.Linear:
    made = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(made.weight, gain)
    nn.init.constant_(made.bias, 0.0)
    return made


class Agent(nn.Module):
    """The actor and the critic of cleanrl's PPO."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(
            layer(4, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 1, 1.0)
        )
        self.actor = nn.Sequential(
            layer(4, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 2, 0.01)
        )

    def get_action_and_value(self, x: torch.Tensor, action: torch.Tensor | None = None) -> Any:
        probs = torch.distributions.Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


def advantages_of(
    rewards: torch.Tensor, values: torch.Tensor, dones: torch.Tensor,
    following: torch.Tensor, next_done: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Estimate the gains of all steps, the last one first."""
    advantages, last = torch.zeros_like(rewards), 0
    for t in reversed(range(len(rewards))):
        nonterminal = 1.0 - next_done
        delta = rewards[t] + 0.99 * following * nonterminal - values[t]
        advantages[t] = last = delta + 0.99 * 0.95 * nonterminal * last
        following, next_done = values[t], dones[t]
    return advantages


def loss_of(
    ratio: torch.Tensor, gain: torch.Tensor, value: torch.Tensor, old: torch.Tensor,
    returns: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The clipped losses of the policy and of the values."""
    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    pg_loss = torch.max(-gain * ratio, -gain * torch.clamp(ratio, 0.8, 1.2)).mean()
    value = value.view(-1)
    v_clipped = old + torch.clamp(value - old, -0.2, 0.2)
    v_loss = 0.5 * torch.max((value - returns) ** 2, (v_clipped - returns) ** 2).mean()
    return pg_loss + 0.5 * v_loss


def ppo(device: str, watch: Watch) -> None:
    """Train as cleanrl's PPO does; a step is 32 of four environments, and 16 updates."""
    import gymnasium
    import numpy as np

    steps, count, epochs, minibatches = 32, 4, 4, 4
    environments = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * count)
    draws = np.random.default_rng(0)
    agent = Agent().to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    obs = torch.zeros((steps, count, 4)).to(device)
    actions, logprobs, rewards, dones, values = (
        torch.zeros((steps, count)).to(device) for _ in range(5)
    )
    next_obs = torch.Tensor(environments.reset(seed=1)[0]).to(device)
    next_done = torch.zeros(count).to(device)
    watch.begin()
    while True:
        for step in range(steps):
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(next_obs)
                values[step] = value.flatten()
            actions[step], logprobs[step] = action, logprob
            seen, reward, ended, cut, _ = environments.step(action.cpu().numpy())
            rewards[step] = torch.tensor(reward).to(device).view(-1)
            next_obs = torch.Tensor(seen).to(device)
            next_done = torch.Tensor(np.logical_or(ended, cut)).to(device)
        with torch.no_grad():
            following = agent.critic(next_obs).reshape(1, -1)
            advantages = advantages_of(rewards, values, dones, following, next_done)
            returns = advantages + values
        b_obs, b_actions = obs.reshape((-1, 4)), actions.reshape(-1)
        b_logprobs, b_values = logprobs.reshape(-1), values.reshape(-1)
        b_advantages, b_returns = advantages.reshape(-1), returns.reshape(-1)
        order, clipped = np.arange(steps * count), []
        for _ in range(epochs):
            draws.shuffle(order)
            for chosen in np.split(order, minibatches):
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(
                    b_obs[chosen], b_actions.long()[chosen]
                )
                logratio = newlogprob - b_logprobs[chosen]
                ratio = logratio.exp()
                with torch.no_grad():
                    clipped += [((ratio - 1.0).abs() > 0.2).float().mean().item()]
                loss = loss_of(
                    ratio, b_advantages[chosen], newvalue, b_values[chosen], b_returns[chosen]
                )
                loss -= 0.01 * entropy.mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        watch.step(loss)
