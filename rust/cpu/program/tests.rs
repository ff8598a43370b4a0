//! What steps rely on in a plan, for random programs; and that whatever does not fit is refused by name.

use proptest::prelude::*;

use super::error::{Extent, Misfit, RecordError};
use super::op::{BufferId, Op, Order, Rows, Value, ValueId, WeightId};
use super::{ModelShape, Program, Recorder, Weight};
use crate::cpu::matrix::Matrix;
use crate::cpu::weight_kind::WeightKind;

/// Queries are 8 wide, keys and values 4.
const SHAPE: ModelShape = ModelShape { num_layers: 2, num_heads: 4, num_kv_heads: 2, head_size: 2, vocab_size: 8 };
const WIDTHS: [usize; 2] = [4, 8];
const EPS: f32 = 1e-5;

/// A recorder and weights that fit values of all of [`WIDTHS`].
struct Kit {
    recorder: Recorder,
    tables: Vec<WeightId>,
    /// Of one head.
    head: WeightId,
    weights: Vec<(WeightId, usize)>,
    /// With inputs and outputs.
    matrices: Vec<(WeightId, usize, usize)>,
}

fn matrix(outputs: usize, inputs: usize) -> Weight {
    let rows = vec![0; 4 * outputs * inputs];
    Weight::Matrix(Matrix::pack(WeightKind::F32, WeightKind::F32, &rows, outputs, inputs).expect("little memory"))
}

impl Kit {
    fn new() -> Self {
        let mut recorder = Recorder::new(SHAPE).expect("a shape that fits");
        let mut add = |name: String, weight| recorder.add_weight(name, weight);
        let tables = WIDTHS.map(|width| add(format!("table {width}"), matrix(9, width))).to_vec();
        let head = add("head".into(), Weight::Vector(vec![1.0; 2]));
        let weights = WIDTHS.map(|width| (add(format!("norm {width}"), Weight::Vector(vec![1.0; width])), width));
        let shapes = WIDTHS.into_iter().flat_map(|inputs| WIDTHS.map(|outputs| (inputs, outputs)));
        let matrices = shapes
            .map(|(inputs, outputs)| {
                (add(format!("product {inputs} {outputs}"), matrix(outputs, inputs)), inputs, outputs)
            })
            .collect();
        Self { recorder, tables, head, weights: weights.to_vec(), matrices }
    }

    fn weight(&self, width: usize) -> WeightId {
        self.weights.iter().find(|weight| weight.1 == width).expect("one of each width").0
    }

    fn matrix(&self, inputs: usize, outputs: usize) -> WeightId {
        self.matrices.iter().find(|matrix| (matrix.1, matrix.2) == (inputs, outputs)).expect("one of each shape").0
    }

    fn extent(&self, value: ValueId) -> Extent {
        self.recorder.values[value.0]
    }

    /// One of the values of this extent, or None where there is none.
    fn one_of(&self, extent: Extent, pick: usize) -> Option<ValueId> {
        let fitting: Vec<usize> =
            (0..self.recorder.values.len()).filter(|&value| self.recorder.values[value] == extent).collect();
        (!fitting.is_empty()).then(|| ValueId(fitting[pick % fitting.len()]))
    }

    /// Records the operation that the numbers say, unless it needs values that are not there.
    fn record(&mut self, kind: usize, picks: [usize; 3]) -> Option<()> {
        let [pick, second, third] = picks;
        if kind == 0 || self.recorder.values.is_empty() {
            self.recorder.embed(self.tables[pick % self.tables.len()]).expect("fits");
            return Some(());
        }
        let x = ValueId(pick % self.recorder.values.len());
        let extent = self.extent(x);
        let queries = Extent { width: SHAPE.q_width(), rows: Rows::Tokens };
        let keys = Extent { width: SHAPE.kv_width(), rows: Rows::Tokens };
        let weight = self.weight(extent.width);
        match kind {
            1 => drop(self.recorder.rms_norm(x, weight, EPS).expect("fits")),
            2 => {
                let residual = self.one_of(extent, second)?;
                self.recorder.add_rms_norm(x, residual, weight, EPS).expect("fits");
            }
            3 => drop(self.recorder.head_norm(x, self.head, EPS).expect("fits")),
            4 => {
                let (q, k, v) = (self.one_of(queries, pick)?, self.one_of(keys, second)?, self.one_of(keys, third)?);
                self.recorder.rope_append(second % SHAPE.num_layers, q, k, v).expect("fits");
            }
            5 => {
                let q = self.one_of(queries, pick)?;
                self.recorder.paged_attention(second % SHAPE.num_layers, q).expect("fits");
            }
            6 => {
                let up = self.one_of(extent, second)?;
                self.recorder.swiglu(x, up).expect("fits");
            }
            7 if extent.rows == Rows::Tokens => drop(self.recorder.select_readback(x).expect("fits")),
            // Several products of one value, as often in a model.
            _ => {
                for at in 0..=third % 3 {
                    let outputs = WIDTHS[(second + at) % WIDTHS.len()];
                    let bias = second.is_multiple_of(3).then(|| self.weight(outputs));
                    self.recorder.linear(x, self.matrix(extent.width, outputs), bias).expect("fits");
                }
            }
        }
        Some(())
    }

    /// Ends the program with a product of one of its values.
    fn choose(&mut self, pick: usize) {
        let x = ValueId(pick % self.recorder.values.len());
        let Extent { width, rows } = self.extent(x);
        let x = if rows == Rows::ReadBack { x } else { self.recorder.select_readback(x).expect("fits") };
        let logits = self.recorder.linear(x, self.matrix(width, SHAPE.vocab_size), None).expect("fits");
        self.recorder.argmax(logits).expect("fits");
    }
}

/// Goes through a planned program as a step does, and keeps book of what lies in each buffer.
struct Reader<'a> {
    program: &'a Program,
    extents: &'a [Extent],
    /// What was written last.
    holds: Vec<Option<(ValueId, Order)>>,
}

impl Reader<'_> {
    /// The plan of a value is one that memory is made for, and says what was recorded.
    fn check_value(&self, id: ValueId, value: Value) {
        assert!(self.program.values.contains(&value), "no memory for {value:?}");
        assert_eq!(Extent { width: value.width, rows: value.rows }, self.extents[id.0]);
    }

    /// The value is still there, in the order in which it was written.
    fn read(&self, id: ValueId, value: Value) {
        self.check_value(id, value);
        let BufferId(buffer) = value.buffer;
        assert_eq!(self.holds[buffer], Some((id, value.order)), "value {id:?} was overwritten: {value:?}");
    }

    /// The operation reads and writes `recorded`, with no output where an input or another output is.
    fn step(&mut self, op: &Op<Value>, recorded: &[ValueId]) {
        let (inputs, outputs) = (op.inputs(), op.outputs());
        assert_eq!(inputs.len() + outputs.len(), recorded.len());
        let (read, written) = recorded.split_at(inputs.len());
        let needed = if matches!(op, Op::Linear { .. }) { Order::Grouped } else { Order::Plain };
        for (&id, &value) in read.iter().zip(&inputs) {
            assert_eq!(value.order, needed, "products read groups, all others rows: {op:?}");
            self.read(id, value);
        }
        for (index, out) in outputs.iter().enumerate() {
            assert!(inputs.iter().all(|input| input.buffer != out.buffer), "writes what it reads: {op:?}");
            assert!(outputs[..index].iter().all(|other| other.buffer != out.buffer), "writes twice: {op:?}");
            assert!(needed == Order::Plain || out.order == Order::Plain, "products write rows: {op:?}");
        }
        for (&id, &value) in written.iter().zip(&outputs) {
            self.check_value(id, value);
            self.holds[value.buffer.0] = Some((id, value.order));
        }
    }
}

fn check_plan(recorded: &[Op<ValueId>], extents: &[Extent], program: &Program) {
    let mut reader = Reader { program, extents, holds: vec![None; program.num_buffers] };
    let mut ops = program.ops.iter();
    for op in recorded {
        let ids = [op.inputs(), op.outputs()].concat();
        let mut planned = ops.next().expect("as many as were recorded");
        if let Op::Regroup { x, out } = planned {
            assert_eq!(out.order, Order::Grouped);
            reader.step(planned, &[ids[0], ids[0]]);
            planned = ops.next().expect("a product");
            assert!(matches!(planned, Op::Linear { x: read, .. } if read == out), "{x:?} is regrouped for {planned:?}");
        }
        assert_eq!(std::mem::discriminant(&planned.renamed(|_| ())), std::mem::discriminant(&op.renamed(|_| ())));
        reader.step(planned, &ids);
    }
    assert!(ops.next().is_none());
    let Some(Op::Argmax { logits }) = recorded.last() else { panic!("ends with argmax") };
    reader.read(*logits, program.logits());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn a_value_lies_where_nothing_overwrites_it_until_it_was_read_and_in_the_order_that_is_read(
        ops in prop::collection::vec((0_usize..12, any::<[usize; 3]>()), 1..40),
        last: usize,
    ) {
        let mut kit = Kit::new();
        for (kind, picks) in ops {
            kit.record(kind, picks);
        }
        kit.choose(last);
        let (recorded, extents) = (kit.recorder.ops.clone(), kit.recorder.values.clone());
        let program = kit.recorder.finish().expect("ends with argmax");
        check_plan(&recorded, &extents, &program);
    }
}

#[test]
fn buffers_are_used_again() {
    let mut kit = Kit::new();
    let mut x = kit.recorder.embed(kit.tables[1]).expect("fits");
    for _ in 0..50 {
        x = kit.recorder.rms_norm(x, kit.weight(8), EPS).expect("fits");
    }
    kit.choose(x.0);
    let program = kit.recorder.finish().expect("ends with argmax");
    assert_eq!((program.values.len(), program.num_buffers), (53, 2));
}

#[test]
fn what_only_products_read_is_written_in_groups_and_the_rest_is_regrouped() {
    let mut kit = Kit::new();
    let x = kit.recorder.embed(kit.tables[1]).expect("fits");
    let norm = kit.recorder.rms_norm(x, kit.weight(8), EPS).expect("fits");
    let gate = kit.recorder.linear(norm, kit.matrix(8, 8), None).expect("fits");
    kit.recorder.linear(norm, kit.matrix(8, 4), None).expect("fits");
    kit.recorder.linear(gate, kit.matrix(8, 8), None).expect("fits");
    kit.choose(x.0);
    let program = kit.recorder.finish().expect("ends with argmax");
    assert_eq!(program.values[norm.0].order, Order::Grouped);
    assert_eq!(program.values[gate.0].order, Order::Plain);
    let counts = |wanted: fn(&Op<Value>) -> bool| program.ops.iter().filter(|op| wanted(op)).count();
    assert_eq!(counts(|op| matches!(op, Op::Regroup { .. })), 1, "gate, which a product writes");
    assert_eq!(counts(|op| matches!(op, Op::Linear { .. })), 3, "those of the norm are one");
}

// Refusals.

#[test]
fn a_shape_that_does_not_fit_is_refused_by_name() {
    let refused = |shape| Recorder::new(shape).expect_err("does not fit");
    for (field, shape) in [
        ("num_layers", ModelShape { num_layers: 0, ..SHAPE }),
        ("num_heads", ModelShape { num_heads: 0, ..SHAPE }),
        ("num_kv_heads", ModelShape { num_kv_heads: 0, ..SHAPE }),
        ("head_size", ModelShape { head_size: 0, ..SHAPE }),
        ("vocab_size", ModelShape { vocab_size: 0, ..SHAPE }),
    ] {
        assert_eq!(refused(shape), RecordError { field, misfit: Misfit::Zero });
    }
    for (said, shape) in [
        ("num_heads: must be a multiple of num_kv_heads 3, not 4", ModelShape { num_kv_heads: 3, ..SHAPE }),
        ("head_size: must be even, not 7", ModelShape { head_size: 7, ..SHAPE }),
        (
            "num_heads: 9223372036854775808 heads of 2 elements are more than there can be",
            ModelShape { num_heads: 1 << 63, ..SHAPE },
        ),
    ] {
        assert_eq!(refused(shape).to_string(), said);
    }
}

#[test]
fn what_does_not_fit_is_refused_by_name_and_not_recorded() {
    let mut kit = Kit::new();
    let wide = kit.recorder.embed(kit.tables[1]).expect("fits");
    let narrow = kit.recorder.embed(kit.tables[0]).expect("fits");
    let read = kit.recorder.select_readback(wide).expect("fits");
    let less = kit.recorder.select_readback(narrow).expect("fits");
    let small = kit.recorder.add_weight("small".into(), matrix(7, 8));
    let odd = kit.recorder.add_weight("odd".into(), matrix(3, 8));
    let odd = kit.recorder.linear(wide, odd, None).expect("fits");
    let (norm, head, product) = (kit.weight(8), kit.head, kit.matrix(8, 8));
    let (no_value, no_weight) = (ValueId(99), WeightId(77));
    let before = format!("{:?}", kit.recorder);
    let r = &mut kit.recorder;
    let said = [
        (r.embed(no_weight).err(), "table: there is no weight 77"),
        (r.embed(norm).err(), "table: norm 8 is a vector, not a matrix"),
        (r.embed(small).err(), "table: an embedding of 7 tokens for a vocabulary of 8"),
        (r.rms_norm(no_value, norm, EPS).err(), "x: there is no value 99"),
        (r.rms_norm(wide, no_weight, EPS).err(), "weight: there is no weight 77"),
        (r.rms_norm(wide, product, EPS).err(), "weight: product 8 8 is a matrix, not a vector"),
        (r.rms_norm(narrow, norm, EPS).err(), "weight: norm 8 has 8 elements, not 4"),
        (r.add_rms_norm(wide, narrow, norm, EPS).err(), "residual: must be [tokens, 8], not [tokens, 4]"),
        (r.add_rms_norm(wide, read, norm, EPS).err(), "residual: must be [tokens, 8], not [rows read back, 8]"),
        (r.add_rms_norm(wide, wide, head, EPS).err(), "weight: head has 2 elements, not 8"),
        (r.linear(no_value, product, None).err(), "x: there is no value 99"),
        (r.linear(wide, norm, None).err(), "weight: norm 8 is a vector, not a matrix"),
        (r.linear(narrow, product, None).err(), "weight: product 8 8 has 8 inputs, the value 4"),
        (r.linear(wide, product, Some(head)).err(), "bias: head has 2 elements, not 8"),
        (r.linear(wide, product, Some(product)).err(), "bias: product 8 8 is a matrix, not a vector"),
        (r.head_norm(odd, head, EPS).err(), "x: a width of 3 is no whole number of heads of 2"),
        (r.head_norm(wide, norm, EPS).err(), "weight: norm 8 has 8 elements, not 2"),
        (r.rope_append(2, wide, narrow, narrow).err(), "layer: there is no layer 2 among 2"),
        (r.rope_append(0, read, narrow, narrow).err(), "q: must be [tokens, 8], not [rows read back, 8]"),
        (r.rope_append(0, wide, wide, narrow).err(), "k: must be [tokens, 4], not [tokens, 8]"),
        (r.rope_append(0, wide, narrow, less).err(), "v: must be [tokens, 4], not [rows read back, 4]"),
        (r.paged_attention(2, wide).err(), "layer: there is no layer 2 among 2"),
        (r.paged_attention(0, narrow).err(), "q: must be [tokens, 8], not [tokens, 4]"),
        (r.swiglu(no_value, wide).err(), "gate: there is no value 99"),
        (r.swiglu(wide, narrow).err(), "up: must be [tokens, 8], not [tokens, 4]"),
        (r.select_readback(read).err(), "x: must be [tokens, 8], not [rows read back, 8]"),
        (r.argmax(no_value).err(), "logits: there is no value 99"),
        (r.argmax(wide).err(), "logits: must be [rows read back, 8], not [tokens, 8]"),
        (r.argmax(less).err(), "logits: 4 logits for a vocabulary of 8"),
    ];
    for (error, said) in said {
        assert_eq!(error.expect(said).to_string(), said);
    }
    assert_eq!(format!("{:?}", kit.recorder), before);
}

#[test]
fn a_program_ends_with_argmax_and_a_refused_end_changes_nothing() {
    let mut kit = Kit::new();
    let said = |count| format!("argmax: a program ends with argmax, and has one: this one has {count}");
    let x = kit.recorder.embed(kit.tables[1]).expect("fits");
    let before = format!("{:?}", kit.recorder);
    assert_eq!(kit.recorder.finish().expect_err("has none").to_string(), said(0));
    assert_eq!(format!("{:?}", kit.recorder), before);
    let read = kit.recorder.select_readback(x).expect("fits");
    kit.recorder.argmax(read).expect("fits");
    kit.recorder.rms_norm(x, kit.weight(8), EPS).expect("fits");
    let before = format!("{:?}", kit.recorder);
    assert_eq!(kit.recorder.finish().expect_err("does not end so").to_string(), said(1));
    assert_eq!(format!("{:?}", kit.recorder), before);
    kit.recorder.argmax(read).expect("fits");
    assert_eq!(kit.recorder.finish().expect_err("has two").to_string(), said(2));
    let mut sound = Kit::new();
    let x = sound.recorder.embed(sound.tables[1]).expect("fits");
    assert!(sound.recorder.finish().is_err());
    sound.choose(x.0);
    let program = sound.recorder.finish().expect("recorded to its end after all");
    assert_eq!(program.ops.len(), 4);
}
