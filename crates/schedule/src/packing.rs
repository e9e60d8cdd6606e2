//! Sizes under hard caps: how many samples fit some buckets, and how many buckets some samples need.

use crate::best_fit::best_fit;
use crate::bisection::least;
use crate::bounds::lower_bound;
use crate::buckets::Buckets;
use crate::caps;
use crate::costs::Costs;
use crate::error::BalanceError;
use crate::greedy::greedy;
use crate::limits::Limits;
use crate::sorted_batch::{Size, SortedBatch};
use crate::stop::Stop;
use std::cmp::Reverse;

/// Numbers of buckets for which a whole search is made before first fit's is taken.
const SEARCHED_MAX: u32 = 8;

/// How many of the first samples of `costs` fit the buckets of `limits` under their caps, as far as [`schedule`] finds a
/// packing of them for certain.
///
/// At least as many samples as buckets, if there are enough samples; all samples without a cap.
///
/// *Complexity*: O(n log^2 n).
///
/// # Errors
/// [`BalanceError::SampleOverCap`] and those of [`Costs::check`].
///
/// [`schedule`]: crate::schedule
pub fn fitting(costs: &Costs, limits: &Limits) -> Result<usize, BalanceError> {
    costs.check()?;
    limits.check(costs)?;
    let (sizes, caps) = sizes_of(costs, limits);
    let num_buckets = limits.num_buckets as usize;
    let mut held = [0_u128; 2];
    let fits_at_all = |size: &Size| {
        held = [0, 1].map(|c: usize| held[c] + u128::from(size[c]));
        (0..2).all(|c| caps[c] == u64::MAX || held[c] <= u128::from(caps[c]) * num_buckets as u128)
    };
    let most = sizes.iter().map(fits_at_all).take_while(|fits| *fits).count();
    // Each alone in a bucket.
    let (mut low, mut high) = (num_buckets.min(sizes.len()), most);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if best_fit(&sizes[..middle], caps, num_buckets).is_some() {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    Ok(low)
}

/// The fewest buckets, a multiple of `multiple`, for which a packing of `costs` under the caps of `limits` was found.
///
/// At least `multiple`; `limits.num_buckets` plays no part. Fewer are proven to be too few, or a search of
/// `limits.max_moves` found no packing.
///
/// # Errors
/// [`BalanceError::ZeroBuckets`] where `multiple` is 0, [`BalanceError::NoCap`] without a cap, and those of
/// [`crate::schedule`] but [`BalanceError::CapsInfeasible`] and [`BalanceError::NoPacking`].
pub fn fewest_buckets(costs: &Costs, limits: &Limits, multiple: u32) -> Result<u32, BalanceError> {
    costs.check()?;
    let with = |num_buckets| Limits { num_buckets, ..*limits };
    with(multiple).check(costs)?;
    if limits.caps(costs).next().is_none() {
        return Err(BalanceError::NoCap { num_samples: costs.num_samples() });
    }
    let (sizes, caps) = sizes_of(costs, limits);
    let multiples = u32::try_from(sizes.len().div_ceil(multiple as usize)).unwrap_or(u32::MAX).max(1);
    // In multiples. So many buckets hold a sample each.
    let enough = |k: u32| best_fit(&sizes, caps, k.saturating_mul(multiple) as usize).is_some();
    let least_of = |low: u32, is_enough: &dyn Fn(u32) -> bool| {
        least(low.into(), multiples.into(), |k| is_enough(k as u32)) as u32
    };
    let fewest = least_of(1, &|k| !is_too_few(&sizes, caps, k.saturating_mul(multiple)));
    let most = least_of(fewest, &enough);
    let searched = (fewest..most).take(SEARCHED_MAX as usize);
    for k in searched {
        let limits = with(k * multiple);
        limits.check(costs)?;
        let batch = SortedBatch::new(costs, &limits);
        if caps::pack(&batch, &limits).is_ok() {
            return Ok(limits.num_buckets);
        }
    }
    with(most.saturating_mul(multiple)).check(costs)?;
    Ok(most * multiple)
}

/// Whether a lower bound of the fullest bucket is over a cap.
fn is_too_few(sizes: &[Size], caps: Size, num_buckets: u32) -> bool {
    (0..2).filter(|&c| caps[c] < u64::MAX).any(|c| {
        let llm_ns: Vec<u64> = sizes.iter().map(|size| size[c]).collect();
        let costs = Costs { encoder_ns: vec![0; sizes.len()], llm_ns, bytes: None, tokens: None };
        let batch = SortedBatch::new(&costs, &Limits::new(sizes.len(), num_buckets));
        let start = greedy(&batch, &Stop::never()).unwrap_or_else(|| vec![0; sizes.len()]);
        lower_bound(&batch, Buckets::new(&batch, start).worst()).cast_unsigned() > caps[c]
    })
}

/// Bytes and tokens of each sample, 0 where there is no cap, and the caps, `u64::MAX` where there is none.
pub(crate) fn sizes_of(costs: &Costs, limits: &Limits) -> (Vec<Size>, Size) {
    let caps = [limits.bucket_bytes_max, limits.bucket_tokens_max];
    let columns = [costs.bytes.as_deref(), costs.tokens.as_deref()];
    let size = |i: usize| {
        [0, 1].map(|c: usize| columns[c].filter(|_| caps[c].is_some()).map_or(0, |column| column[i]))
    };
    ((0..costs.num_samples()).map(size).collect(), caps.map(|cap| cap.unwrap_or(u64::MAX)))
}

/// The samples of each bucket, none of them empty where there are as many samples as buckets.
///
/// A bucket without samples takes the cheapest one of the bucket with the most: samples without cost, or a giant that leaves
/// no work to the others, make such buckets, and no loader takes an empty list.
pub fn filled(costs: &Costs, bucket: &[u32], num_buckets: u32) -> Vec<Vec<u32>> {
    let mut members = vec![Vec::new(); num_buckets as usize];
    for (sample, &bucket) in (0..).zip(bucket) {
        members[bucket as usize].push(sample);
    }
    let cost = |sample: u32| {
        u128::from(costs.encoder_ns[sample as usize]) + u128::from(costs.llm_ns[sample as usize])
    };
    let empty: Vec<usize> = (0..members.len()).filter(|&b| members[b].is_empty()).collect();
    for b in empty {
        let fullest = (0..members.len()).max_by_key(|&b| (members[b].len(), Reverse(b))).unwrap_or(b);
        if members[fullest].len() < 2 {
            break;
        }
        let cheapest = (0..members[fullest].len()).min_by_key(|&at| cost(members[fullest][at])).unwrap_or(0);
        let sample = members[fullest].remove(cheapest);
        members[b].push(sample);
    }
    members
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_tokens(tokens: &[u64], cap: u64, num_buckets: u32) -> (Costs, Limits) {
        let ones = vec![1; tokens.len()];
        let costs =
            Costs { encoder_ns: ones.clone(), llm_ns: ones, tokens: Some(tokens.to_vec()), bytes: None };
        let limits = Limits { bucket_tokens_max: Some(cap), ..Limits::new(tokens.len(), num_buckets) };
        (costs, limits)
    }

    #[test]
    fn eight_samples_of_seven_need_eight_buckets_of_eight() {
        // By their sum, 56, seven buckets would do.
        let (costs, limits) = of_tokens(&[7; 8], 8, 1);
        assert_eq!(fewest_buckets(&costs, &limits, 1), Ok(8));
        assert_eq!(fewest_buckets(&costs, &limits, 3), Ok(9));
        assert_eq!(fewest_buckets(&costs, &limits, 16), Ok(16));
    }

    #[test]
    fn the_fewest_are_found_where_the_largest_first_takes_more() {
        // Even to the last token: 44 + 8 + 8, 24 + 24 + 6 + 6, 22 + 21 + 17. Largest first puts an 8 beside the 24s.
        let (costs, limits) = of_tokens(&[44, 24, 24, 22, 21, 17, 8, 8, 6, 6], 60, 1);
        let sizes = sizes_of(&costs, &limits).0;
        assert_eq!([3, 4].map(|m| best_fit(&sizes, [u64::MAX, 60], m).is_some()), [false, true]);
        assert_eq!(fewest_buckets(&costs, &limits, 1), Ok(3));
    }

    #[test]
    fn as_many_as_fit_and_no_more() {
        let fit = |tokens: &[u64], cap, m| {
            let (costs, limits) = of_tokens(tokens, cap, m);
            fitting(&costs, &limits).unwrap()
        };
        // Two buckets of 10: 6 + 4, 5 + 5, and the sixth finds none.
        assert_eq!(fit(&[6, 5, 4, 5, 1], 10, 2), 4);
        assert_eq!(fit(&[7; 8], 8, 4), 4);
        assert_eq!(fit(&[1, 1], 8, 4), 2);
        assert_eq!(fit(&[0; 50], 8, 4), 50);
        assert_eq!(fit(&[], 8, 4), 0);
        let (costs, limits) = of_tokens(&[9, 1], 8, 2);
        let over = BalanceError::SampleOverCap { sample: 0, unit: "tokens", size: 9, cap: 8 };
        assert_eq!(fitting(&costs, &limits), Err(over));
    }

    #[test]
    fn what_fits_is_scheduled() {
        // Tight: both caps bind, and the first samples that fit must find their packing again.
        let mut state = 1_u64;
        let mut draw = |end: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % end
        };
        for round in 0..60 {
            let n = 40;
            let column =
                |draw: &mut dyn FnMut(u64) -> u64, end| (0..n).map(|_| draw(end)).collect::<Vec<u64>>();
            let costs = Costs {
                encoder_ns: column(&mut draw, 50),
                llm_ns: column(&mut draw, 50),
                bytes: (round % 2 == 0).then(|| column(&mut draw, 30)),
                tokens: Some(column(&mut draw, 100)),
            };
            let limits = Limits {
                bucket_bytes_max: costs.bytes.as_ref().map(|_| 40),
                bucket_tokens_max: Some(120),
                ..Limits::new(n, 5)
            };
            let count = fitting(&costs, &limits).unwrap();
            assert!((5..n).contains(&count), "{count}");
            let first = |column: &Vec<u64>| column[..count].to_vec();
            let some = Costs {
                encoder_ns: first(&costs.encoder_ns),
                llm_ns: first(&costs.llm_ns),
                bytes: costs.bytes.as_ref().map(first),
                tokens: costs.tokens.as_ref().map(first),
            };
            crate::schedule(&some, &limits).unwrap();
        }
    }

    #[test]
    fn no_cap_asks_for_no_number_of_buckets() {
        let costs = Costs { encoder_ns: vec![1; 3], llm_ns: vec![1; 3], ..Costs::default() };
        let none = fewest_buckets(&costs, &Limits::new(3, 1), 1);
        assert_eq!(none, Err(BalanceError::NoCap { num_samples: 3 }));
        assert_eq!(fitting(&costs, &Limits::new(3, 1)), Ok(3));
    }

    #[test]
    fn no_bucket_stays_empty_where_there_are_samples_enough() {
        let costs = Costs { encoder_ns: vec![0, 0, 0, 9], llm_ns: vec![5, 1, 2, 0], ..Costs::default() };
        assert_eq!(filled(&costs, &[0, 0, 0, 1], 4), [vec![0], vec![3], vec![1], vec![2]]);
        assert_eq!(filled(&costs, &[0, 0, 1, 1], 2), [vec![0, 1], vec![2, 3]]);
        assert_eq!(filled(&costs, &[2, 2, 2, 2], 6).iter().filter(|b| b.is_empty()).count(), 2);
    }
}
