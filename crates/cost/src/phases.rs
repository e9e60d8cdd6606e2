//! One part of a module, linear or attention, as it runs under given settings: which of its curves count, read side by
//! side.

use crate::error::CostError;
use crate::grid::{Curve, Growth, Position, along, marginal, scale};
use crate::mode::{Mode, Runs};
use crate::prediction::Prediction;
use crate::repair::Repair;
use dflop_types::{MeasuredCurve, MeasuredPoint, Recompute, RecomputePoint};

/// The measured quantities of one part of a module, as far as it runs them.
#[derive(Debug, Clone)]
pub(crate) struct Phases {
    forward: Curve,
    /// `None`: it takes no time.
    backward: Option<Curve>,
    input: Option<Curve>,
    weight: Option<Curve>,
    /// Longer backward because of recomputation.
    extra: Option<Curve>,
    /// Which half has `extra` if I and W run separately: I, unless it does not run.
    extra_is_of_weight: bool,
    /// `None`: nothing is kept.
    pub(crate) activation: Option<Curve>,
    /// Standard error of the median of forward plus backward, by point.
    error_ns: Vec<u64>,
    /// The curves once more, side by side, for sizes within the measured range: half of the time of a prediction went
    /// to fetching them apart. Empty where a piece is too long or steep for it.
    rows: Vec<Row>,
}

/// What a point says: values of F, B, I and W, and their slopes on the piece that ends there.
#[derive(Debug, Clone, Copy, Default)]
struct Row {
    ns: [u64; 4],
    slopes: [u64; 4],
    /// Of the piece that ends there.
    error_ns: u64,
}

/// Standard error of the median of a point, in nanoseconds, rounded to the nearest; 0 where it was not repeated.
///
/// ```text
/// s = 1.25 * R / (1.35 * sqrt(n)),    R = third minus first quartile of n runs
/// ```
///
/// *References*: McGill, Tukey, Larsen, "Variations of Box Plots", The American Statistician 32(1), 1978: the
/// standard deviation of a median by its quartiles, exact for normal noise and near to it for other.
pub(crate) fn standard_error_ns(point: &MeasuredPoint) -> u64 {
    if point.repeats == 0 {
        return 0;
    }
    (1.25 * point.spread_ns as f64 / (1.35 * f64::from(point.repeats).sqrt())).round() as u64
}

/// The raw curves of a part, with the repairs they needed.
struct Raw<'a> {
    module: &'static str,
    part: &'static str,
    growth: Growth,
    repairs: &'a mut Vec<Repair>,
}

impl Raw<'_> {
    fn curve(
        &mut self,
        phase: &'static str,
        points: impl Iterator<Item = (u64, u64)>,
    ) -> Result<Curve, CostError> {
        let (module, part) = (self.module, self.part);
        let curve = Curve::new(points).map_err(|source| CostError::Curve { module, part, source })?;
        let num_points = curve.num_repaired();
        if num_points > 0 {
            self.repairs.push(Repair { module, part, phase, num_points });
        }
        Ok(curve.growing(self.growth))
    }

    fn of(
        &mut self,
        phase: &'static str,
        measured: &MeasuredCurve,
        value: fn(&MeasuredPoint) -> u64,
    ) -> Result<Curve, CostError> {
        self.curve(phase, measured.points.iter().map(|p| (p.size, value(p))))
    }
}

impl Phases {
    /// The part of `mode`'s module by this name; `extra` is what recomputation adds.
    pub(crate) fn new(
        mode: Mode,
        part: &'static str,
        measured: &MeasuredCurve,
        extra: Option<&[RecomputePoint]>,
        repairs: &mut Vec<Repair>,
    ) -> Result<Self, CostError> {
        let module = mode.name;
        if let Some(point) = measured.points.iter().find(|p| p.forward_ns == 0 && p.size > 0) {
            return Err(CostError::ZeroTime { module, part, size: point.size });
        }
        let is_attention = part == "attention";
        let growth = if is_attention { Growth::Square } else { Growth::Linear };
        let mut raw = Raw { module, part, growth, repairs };
        let forward = raw.of("forward", measured, |p| p.forward_ns)?;
        let backward = raw.of("backward", measured, |p| p.backward_ns)?;
        let input = raw.of("input", measured, |p| p.input_ns)?;
        let weight = raw.of("weight", measured, |p| p.weight_ns)?;
        if mode.runs == Runs::Input && input.is_zero() && weight.is_zero() && !backward.is_zero() {
            return Err(CostError::NoInputGradient { module, part });
        }
        let mut activation = Some(raw.of("activation", measured, |p| p.activation_bytes)?);
        raw.growth = Growth::Linear;
        let mut longer = None;
        if let Some(points) = extra {
            longer = Some(raw.curve("recompute", points.iter().map(|p| (p.size, p.extra_ns)))?);
            activation = Some(raw.curve("activation", points.iter().map(|p| (p.size, p.activation_bytes)))?);
        }
        let (mut backward, mut input, mut weight) = match mode.runs {
            Runs::Whole => (Some(backward), Some(input), Some(weight)),
            Runs::Weight => (Some(backward.clone()), None, Some(backward)),
            Runs::Input => (Some(input.clone()), Some(input), None),
            Runs::Forward => (None, None, None),
        };
        if is_attention && mode.recompute == Recompute::Full && mode.runs != Runs::Forward {
            let runs_again = if mode.runs == Runs::Weight { &mut weight } else { &mut input };
            for curve in [&mut backward, runs_again].into_iter().flatten() {
                *curve = curve.plus(&forward);
            }
            activation = None;
        }
        if mode.runs == Runs::Forward {
            (longer, activation) = (None, None);
        }
        let some = |curve: Option<Curve>| curve.filter(|curve| !curve.is_zero());
        let phases = Self {
            forward,
            backward: some(backward),
            input: some(input),
            weight: some(weight),
            extra: some(longer),
            extra_is_of_weight: mode.runs == Runs::Weight,
            activation,
            error_ns: measured.points.iter().map(standard_error_ns).collect(),
            rows: Vec::new(),
        };
        Ok(Self { rows: phases.rows(), ..phases })
    }

    fn rows(&self) -> Vec<Row> {
        let curves = [Some(&self.forward), self.backward.as_ref(), self.input.as_ref(), self.weight.as_ref()];
        if curves.into_iter().flatten().any(|curve| !curve.has_slopes()) {
            return Vec::new();
        }
        let mut rows = vec![Row::default(); self.error_ns.len()];
        for (phase, curve) in curves.into_iter().enumerate() {
            for (row, (ns, slope)) in rows.iter_mut().zip(curve.into_iter().flat_map(Curve::pieces)) {
                (row.ns[phase], row.slopes[phase]) = (ns, slope);
            }
        }
        for (index, row) in rows.iter_mut().enumerate().skip(1) {
            row.error_ns = self.error_ns[index].max(self.error_ns[index - 1]);
        }
        rows
    }

    /// One run at `size`, which is not 0.
    ///
    /// *Complexity*: O(log n).
    pub(crate) fn one(&self, size: u64) -> Prediction {
        let position = self.forward.position(size);
        let mut one = match position {
            Position::Between { next, part, .. } if !self.rows.is_empty() => {
                let (before, row) = (&self.rows[next - 1], &self.rows[next]);
                let ns = |phase: usize| before.ns[phase] + along(row.slopes[phase], part);
                Prediction {
                    forward_ns: ns(0),
                    backward_ns: ns(1),
                    input_ns: ns(2),
                    weight_ns: ns(3),
                    uncertainty_ns: row.error_ns,
                    ..Prediction::default()
                }
            }
            _ => self.read(position),
        };
        if let Some(extra) = &self.extra {
            let extra = extra.at(size);
            one.lengthen(extra.value, self.extra_is_of_weight);
            one.extrapolated |= extra.extrapolated;
        }
        one
    }

    /// One run at a position, curve by curve.
    fn read(&self, position: Position) -> Prediction {
        let read = |curve: &Option<Curve>| curve.as_ref().map_or(0, |curve| curve.read(position));
        Prediction {
            forward_ns: self.forward.read(position),
            backward_ns: read(&self.backward),
            input_ns: read(&self.input),
            weight_ns: read(&self.weight),
            uncertainty_ns: self.error_at(position),
            extrapolated: position.is_outside(),
            assumed: false,
        }
    }

    /// Standard error at a position: between two points the larger standard error of the two, as a mean of two is no
    /// less certain than the worse of them; above the last in proportion to the size.
    fn error_at(&self, position: Position) -> u64 {
        let last = self.error_ns.len() - 1;
        match position {
            Position::At(index) => self.error_ns[index],
            Position::Between { next, .. } => self.error_ns[next - 1].max(self.error_ns[next]),
            Position::Below(_) => self.error_ns[0],
            Position::Above(size) => scale(self.error_ns[last], size, self.forward.range().1.max(1)),
        }
    }

    /// Forward and backward of one run at `size`, in nanoseconds; 0 at size 0.
    pub(crate) fn whole_ns(&self, size: u64) -> u64 {
        if size == 0 {
            return 0;
        }
        let position = self.forward.position(size);
        let backward = self.backward.as_ref().map_or(0, |curve| curve.read(position));
        let extra = self.extra.as_ref().map_or(0, |curve| curve.at(size).value);
        self.forward.read(position).saturating_add(backward).saturating_add(extra)
    }

    /// Forward and backward that `size` more units add to about `typical`, in nanoseconds.
    pub(crate) fn marginal_ns(&self, size: u64, typical: u64) -> u64 {
        let curves = [Some(&self.forward), self.backward.as_ref(), self.extra.as_ref()];
        let added = curves.into_iter().flatten().map(|curve| marginal(size, typical, |x| curve.at(x).value));
        added.fold(0, u64::saturating_add)
    }

    /// No way to cut `size` tokens into parts takes less, in nanoseconds, but for the rounding of each part.
    pub(crate) fn ns_min(&self, size: u64) -> f64 {
        let curves = [Some(&self.forward), self.backward.as_ref(), self.extra.as_ref()];
        curves.into_iter().flatten().map(|curve| curve.rate_min(size)).sum::<f64>() * size as f64
    }
}
