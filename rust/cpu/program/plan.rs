//! Orders and buffers of a program's values, chosen once, before the first step.

use super::error::Extent;
use super::op::{BufferId, Op, Order, Value, ValueId};

/// Operations over planned values.
#[derive(Debug)]
pub(super) struct Plan {
    pub ops: Vec<Op<Value>>,
    pub values: Vec<Value>,
    pub num_buffers: usize,
}

/// Plans `ops`, whose values are as wide and have the rows that `extents` says.
pub(super) fn plan(mut extents: Vec<Extent>, ops: Vec<Op<ValueId>>) -> Plan {
    let mut orders = choose_orders(extents.len(), &ops);
    let ops = regroup(&mut extents, &mut orders, ops);
    let (buffers, num_buffers) = assign_buffers(extents.len(), &ops);
    let values: Vec<Value> = extents
        .into_iter()
        .zip(buffers)
        .zip(orders)
        .map(|((Extent { width, rows }, buffer), order)| Value { buffer, width, rows, order })
        .collect();
    Plan { ops: ops.iter().map(|op| op.renamed(|value| values[value.0])).collect(), values, num_buffers }
}

/// Decides which values lie in group order: those that only products read.
fn choose_orders(num_values: usize, ops: &[Op<ValueId>]) -> Vec<Order> {
    // Products write plain rows, and a residual is read and written as plain rows.
    let mut is_plain = vec![false; num_values];
    let mut is_read_by_product = vec![false; num_values];
    for op in ops {
        let is_product = matches!(op, Op::Linear { .. });
        let plain = match op {
            Op::Linear { .. } => op.outputs(),
            Op::AddRmsNorm { total, .. } => [op.inputs(), vec![*total]].concat(),
            _ => op.inputs(),
        };
        for value in plain {
            is_plain[value.0] = true;
        }
        for value in op.inputs().into_iter().filter(|_| is_product) {
            is_read_by_product[value.0] = true;
        }
    }
    let order = |(is_plain, is_read): (bool, bool)| if is_read && !is_plain { Order::Grouped } else { Order::Plain };
    is_plain.into_iter().zip(is_read_by_product).map(order).collect()
}

/// Inserts, before each product of a plain value, an operation that brings this value into group order.
fn regroup(extents: &mut Vec<Extent>, orders: &mut Vec<Order>, ops: Vec<Op<ValueId>>) -> Vec<Op<ValueId>> {
    let mut regrouped = Vec::with_capacity(ops.len());
    for mut op in ops {
        if let Op::Linear { x, .. } = &mut op
            && orders[x.0] == Order::Plain
        {
            let out = ValueId(extents.len());
            extents.push(extents[x.0]);
            orders.push(Order::Grouped);
            regrouped.push(Op::Regroup { x: *x, out });
            *x = out;
        }
        regrouped.push(op);
    }
    regrouped
}

/// Gives each value a buffer that no other value uses from its making to its last reading. What an operation makes
/// never lies where something that it reads does: the threads of a step rely on it.
fn assign_buffers(num_values: usize, ops: &[Op<ValueId>]) -> (Vec<BufferId>, usize) {
    let mut last_use = vec![0; num_values];
    for (at, op) in ops.iter().enumerate() {
        for value in op.inputs().into_iter().chain(op.outputs()) {
            last_use[value.0] = at;
        }
    }
    let mut buffers = vec![BufferId(usize::MAX); num_values];
    let mut free: Vec<BufferId> = Vec::new();
    let mut count = 0;
    for (at, op) in ops.iter().enumerate() {
        for value in op.outputs() {
            buffers[value.0] = free.pop().unwrap_or_else(|| {
                count += 1;
                BufferId(count - 1)
            });
        }
        let mut done: Vec<ValueId> = op.inputs().into_iter().chain(op.outputs()).collect();
        done.retain(|value| last_use[value.0] == at);
        done.sort_unstable_by_key(|value| value.0);
        done.dedup();
        free.extend(done.into_iter().map(|value| buffers[value.0]));
    }
    (buffers, count)
}
