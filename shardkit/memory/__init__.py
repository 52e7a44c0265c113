"""Estimate the memory of a rank under each strategy, find a plan for a memory budget."""

from shardkit.memory.budget import BudgetPlan as BudgetPlan
from shardkit.memory.budget import plan_for_budget as plan_for_budget
from shardkit.memory.estimate import MemoryEstimate as MemoryEstimate
from shardkit.memory.estimate import estimate as estimate
from shardkit.memory.timeline import OPTIMIZERS as OPTIMIZERS
from shardkit.memory.timeline import Prediction as Prediction
