"""Features of training: optimizers, schedules, losses, precision."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from feature_cases.programs import (
    drawn,
    feature,
    gradients,
    integers,
    loss_case,
    made,
    optimizer_case,
    perceptron,
    schedule_case,
    table,
    trained,
)

table(
    "optimizers",
    SGD=optimizer_case("SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    Adam=optimizer_case("Adam", lr=0.01, amsgrad=True),
    AdamW=optimizer_case("AdamW", lr=0.01),
    Adam_capturable=optimizer_case("Adam", lr=0.01, foreach=False),
    Adagrad=optimizer_case("Adagrad", lr=0.1),
    Adadelta=optimizer_case("Adadelta", lr=1.0),
    Adamax=optimizer_case("Adamax", lr=0.01),
    NAdam=optimizer_case("NAdam", lr=0.01),
    RAdam=optimizer_case("RAdam", lr=0.01),
    RMSprop=optimizer_case("RMSprop", lr=0.01, momentum=0.5, centered=True),
    Rprop=optimizer_case("Rprop", lr=0.01),
    ASGD=optimizer_case("ASGD", lr=0.1),
    Adafactor=optimizer_case("Adafactor", lr=0.01),
    LBFGS=optimizer_case("LBFGS", lr=0.1, max_iter=4),
    LBFGS_with_a_line_search=optimizer_case("LBFGS", max_iter=4, line_search_fn="strong_wolfe"),
    SGD_fused=optimizer_case("SGD", lr=0.1, momentum=0.9, fused=True),
    Adam_foreach=optimizer_case("Adam", lr=0.01, foreach=True),
    Muon=optimizer_case("Muon", lr=0.01),
)
table(
    "schedules",
    StepLR=schedule_case("StepLR", step_size=2, gamma=0.5),
    MultiStepLR=schedule_case("MultiStepLR", milestones=[1, 3]),
    ExponentialLR=schedule_case("ExponentialLR", gamma=0.9),
    CosineAnnealingLR=schedule_case("CosineAnnealingLR", T_max=4),
    CosineAnnealingWarmRestarts=schedule_case("CosineAnnealingWarmRestarts", T_0=2),
    LinearLR=schedule_case("LinearLR"),
    PolynomialLR=schedule_case("PolynomialLR", total_iters=4),
    LambdaLR=schedule_case("LambdaLR", lr_lambda=lambda n: 0.9**n),
    CyclicLR=schedule_case("CyclicLR", base_lr=0.01, max_lr=0.1),
    OneCycleLR=schedule_case("OneCycleLR", max_lr=0.1, total_steps=10),
    ReduceLROnPlateau=schedule_case("ReduceLROnPlateau", patience=0),
)


@feature("schedules")
def averaged_model(d):
    module = made(perceptron, d)
    average = torch.optim.swa_utils.AveragedModel(
        module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        trained(module, optimizer, d)
        average.update_parameters(module)
    return list(average.parameters()), average.n_averaged


@feature("optimizers")
def state_of_an_optimizer_moves(d):
    module = made(perceptron, d)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    trained(module, optimizer, d)
    other = copy.deepcopy(module)
    resumed = torch.optim.Adam(other.parameters(), lr=0.5)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return trained(module, optimizer, d), trained(other, resumed, d)


@feature("optimizers")
def optimizer_hooks_and_groups(d):
    module, seen = made(perceptron, d), []
    optimizer = torch.optim.SGD(
        [{"params": module[0].parameters()}, {"params": module[2].parameters(), "lr": 0.01}], lr=0.1
    )
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    return trained(module, optimizer, d), len(seen)


@feature("optimizers")
def gradients_are_clipped(d):
    module = made(perceptron, d)
    module(drawn(d, 8, 4)).square().sum().backward()
    norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    nn.utils.clip_grad_value_(module.parameters(), 0.1)
    return norm, [p.grad for p in module.parameters()]


scores = lambda d: drawn(d, 5, 4)  # noqa: E731
classes = lambda d: integers(d, 4, 5)  # noqa: E731
other_scores = lambda d: drawn(d, 5, 4, seed=1)  # noqa: E731
signs = lambda d: integers(d, 2, 5) * 2 - 1  # noqa: E731
shares = lambda d: drawn(d, 5, 4, seed=2).softmax(-1)  # noqa: E731

table(
    "losses",
    CrossEntropyLoss=loss_case(
        "CrossEntropyLoss", scores, classes, label_smoothing=0.1, ignore_index=2
    ),
    CrossEntropyLoss_of_shares=loss_case("CrossEntropyLoss", scores, shares),
    NLLLoss=loss_case("NLLLoss", scores, classes),
    BCEWithLogitsLoss=loss_case("BCEWithLogitsLoss", scores, shares),
    BCELoss=loss_case("BCELoss", shares, lambda d: shares(d).round()),
    MSELoss=loss_case("MSELoss", scores, other_scores),
    SmoothL1Loss=loss_case("SmoothL1Loss", scores, other_scores),
    HuberLoss=loss_case("HuberLoss", scores, other_scores, delta=0.5),
    KLDivLoss=loss_case(
        "KLDivLoss", lambda d: scores(d).log_softmax(-1), shares, reduction="batchmean"
    ),
    PoissonNLLLoss=loss_case("PoissonNLLLoss", scores, lambda d: shares(d) * 5),
    GaussianNLLLoss=loss_case("GaussianNLLLoss", scores, other_scores, shares),
    HingeEmbeddingLoss=loss_case("HingeEmbeddingLoss", lambda d: drawn(d, 5), signs),
    MarginRankingLoss=loss_case(
        "MarginRankingLoss", lambda d: drawn(d, 5), lambda d: drawn(d, 5, seed=1), signs
    ),
    MultiMarginLoss=loss_case("MultiMarginLoss", scores, classes),
    MultiLabelMarginLoss=loss_case(
        "MultiLabelMarginLoss", scores, lambda d: torch.tensor([[1, 0, -1, -1]] * 5, device=d)
    ),
    MultiLabelSoftMarginLoss=loss_case(
        "MultiLabelSoftMarginLoss", scores, lambda d: integers(d, 2, 5, 4).float()
    ),
    SoftMarginLoss=loss_case("SoftMarginLoss", lambda d: drawn(d, 5), signs),
    TripletMarginLoss=loss_case(
        "TripletMarginLoss", scores, other_scores, lambda d: drawn(d, 5, 4, seed=2)
    ),
    CosineEmbeddingLoss=loss_case("CosineEmbeddingLoss", scores, other_scores, signs),
    CTCLoss=lambda d: gradients(
        lambda x: F.ctc_loss(
            x.log_softmax(-1), integers(d, 4, 2, 3) + 1, torch.tensor([8, 7]), torch.tensor([3, 2])
        ),
        drawn(d, 8, 2, 5),
    ),
)


@feature("precision")
def autocast(d):
    module = made(perceptron, d)
    with torch.autocast(d, dtype=torch.bfloat16):
        output = module(drawn(d, 2, 4))
        loss = F.cross_entropy(output, integers(d, 3, 2))
    loss.backward()
    return output.dtype, loss.dtype, [p.grad.dtype for p in module.parameters()]


@feature("precision")
def autocast_of_own_functions(d):
    class Doubled(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=d, cast_inputs=torch.float32)
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type=d)
        def backward(ctx, gradient):
            return gradient * 2

    with torch.autocast(d, dtype=torch.bfloat16):
        return gradients(Doubled.apply, drawn(d, 3).bfloat16().float())


@feature("precision")
def scaled_losses(d):
    module = made(perceptron, d)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(d, init_scale=8.0, growth_interval=2)
    for step in range(3):
        optimizer.zero_grad()
        loss = module(drawn(d, 2, 4, seed=step)).square().mean()
        if step == 1:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), list(module.parameters())
