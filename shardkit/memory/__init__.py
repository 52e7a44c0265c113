"""Estimate the memory of a rank under each strategy, find a plan for a memory budget."""

from shardkit.memory.allocations import OPTIMIZERS as OPTIMIZERS
from shardkit.memory.allocations import Prediction as Prediction
from shardkit.memory.budget import BudgetPlan as BudgetPlan
from shardkit.memory.budget import plan_for_budget as plan_for_budget
from shardkit.memory.strategies import MemoryEstimate as MemoryEstimate
from shardkit.memory.strategies import estimate as estimate
