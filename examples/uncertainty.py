"""How sure a network with BN may be of what it says: a Laplace posterior (needs the extra `laplace`)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from xkfac.integrations.laplace import XKFACLaplace

NOISE = 0.2
torch.manual_seed(0)
x = torch.cat([torch.linspace(-4, -1, 100), torch.linspace(1, 4, 100)])[:, None]  # nothing between -1 and 1
y = x.sin() + NOISE * torch.randn_like(x)
loader = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)

model = nn.Sequential(
    *(nn.Linear(1, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh()),
    nn.Linear(32, 1),
)
optimizer = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=1e-3)
for _ in range(200):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), labels).backward()
        optimizer.step()

posterior = XKFACLaplace(model, "regression", sigma_noise=NOISE)
posterior.fit(loader)
posterior.optimize_prior_precision()

places = {"between -3 and -2, among examples": (-3, -2), "between -0.5 and 0.5, in the gap": (-0.5, 0.5)}
places["between 6 and 7, far away"] = (6, 7)
deviations = []
for name, (low, high) in places.items():
    at = torch.linspace(low, high, 50)[:, None]
    mean, variance = posterior(at)
    error = (mean - at.sin()).square().mean().sqrt()
    deviations.append(variance.mean().sqrt().item())
    print(f"{name}: standard deviation {deviations[-1]:.2f}, real error {error:.2f}")
