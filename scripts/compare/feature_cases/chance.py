"""Distributions and random numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from feature_cases.programs import distribution_case, drawn, feature, table

table(
    "distributions",
    Normal=distribution_case("Normal", 0.5, 2.0),
    LogNormal=distribution_case("LogNormal", 0.5, 0.3),
    Uniform=distribution_case("Uniform", -1.0, 2.0),
    Bernoulli=distribution_case("Bernoulli", 0.3, validate_args=False),
    Categorical=distribution_case("Categorical", [0.2, 0.3, 0.5]),
    OneHotCategorical=distribution_case("OneHotCategorical", [0.2, 0.8], validate_args=False),
    Beta=distribution_case("Beta", 2.0, 3.0),
    Gamma=distribution_case("Gamma", 2.0, 3.0),
    Dirichlet=distribution_case("Dirichlet", [1.0, 2.0, 3.0]),
    Exponential=distribution_case("Exponential", 2.0),
    Laplace=distribution_case("Laplace", 0.5, 2.0),
    Gumbel=distribution_case("Gumbel", 0.5, 2.0),
    StudentT=distribution_case("StudentT", 5.0),
    Poisson=distribution_case("Poisson", 3.0, validate_args=False),
    Geometric=distribution_case("Geometric", 0.3, validate_args=False),
    MultivariateNormal=distribution_case(
        "MultivariateNormal", [0.5, 1.0], covariance_matrix=[[2.0, 0.5], [0.5, 1.0]]
    ),
    Weibull=distribution_case("Weibull", 2.0, 1.5),
)


@feature("distributions")
def gradients_through_samples(d):
    mean = torch.zeros(3, device=d, requires_grad=True)
    torch.distributions.Normal(mean, 1.0).rsample((4,)).sum().backward()
    return mean.grad


@feature("distributions")
def divergence(d):
    normal = torch.distributions.Normal
    return torch.distributions.kl_divergence(
        normal(drawn(d, 3), 1.0), normal(drawn(d, 3, seed=1), 2.0)
    )


@feature("distributions")
def transformed(d):
    base = torch.distributions.Normal(torch.zeros(2, device=d), torch.ones(2, device=d))
    transforms = [
        torch.distributions.transforms.AffineTransform(1.0, 2.0),
        torch.distributions.transforms.SigmoidTransform(),
    ]
    one = torch.distributions.TransformedDistribution(base, transforms)
    return one.log_prob(torch.tensor([0.3, 0.7], device=d)), one.cdf(
        torch.full((2,), 0.4, device=d)
    )


@feature("distributions")
def mixture(d):
    torch_d = torch.distributions
    one = torch_d.MixtureSameFamily(
        torch_d.Categorical(torch.tensor([0.3, 0.7], device=d)),
        torch_d.Normal(torch.tensor([0.0, 1.0], device=d), torch.ones(2, device=d)),
    )
    return one.log_prob(drawn(d, 4)), one.mean, one.sample((3,)).shape


@feature("random numbers")
def the_state_is_restored(d):
    module = torch if d == "cpu" else torch.get_device_module(d)
    state = module.get_rng_state()
    first = torch.rand(4, device=d)
    module.set_rng_state(state)
    return torch.equal(first, torch.rand(4, device=d))


@feature("random numbers")
def fork_rng(d):
    torch.manual_seed(3)
    with torch.random.fork_rng(devices=[] if d == "cpu" else [0], device_type=d):
        torch.rand(2, device=d)
    first = torch.rand(2, device=d)
    torch.manual_seed(3)
    return torch.equal(first, torch.rand(2, device=d))


@feature("random numbers")
def generators(d):
    one, other = (torch.Generator(device=d).manual_seed(5) for _ in range(2))
    same = torch.equal(
        torch.randn(3, device=d, generator=one), torch.randn(3, device=d, generator=other)
    )
    return same, torch.randperm(5, device=d, generator=one).sort().values


@feature("random numbers")
def dropout_keeps_the_mean(d):
    torch.manual_seed(0)
    return bool((F.dropout(torch.ones(4000, device=d), 0.5).mean() - 1).abs() < 0.1)


@feature("random numbers")
def multinomial_draws_what_has_weight(d):
    weights = torch.tensor([0.0, 1.0, 2.0, 0.0], device=d)
    drawn_once = torch.multinomial(weights, 2)
    return drawn_once.sort().values, torch.multinomial(weights, 50, replacement=True).unique()


@feature("random numbers")
def gumbel_softmax_is_one_hot(d):
    return F.gumbel_softmax(drawn(d, 6, 4), hard=True).sum(-1)
