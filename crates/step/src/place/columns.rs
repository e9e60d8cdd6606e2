//! Columns: which buckets together form a microbatch. A column has one bucket for each LLM replica.

use std::cmp::Reverse;

/// The number of the bucket of `[microbatch][llm replica]`.
pub(crate) type Columns = Vec<Vec<usize>>;

/// The bucket of each sample in new numbers, microbatch * replicas + replica, if the buckets stand in `columns`.
pub(crate) fn renumbered<'a>(bucket: &[u32], columns: impl Iterator<Item = &'a Vec<usize>>) -> Vec<u32> {
    let mut number = Vec::new();
    for (at, &bucket) in (0..).zip(columns.flatten()) {
        if number.len() <= bucket {
            number.resize(bucket + 1, 0);
        }
        number[bucket] = at;
    }
    bucket.iter().map(|&bucket| number[bucket as usize]).collect()
}

/// Buckets in the order given: the first `replicas` form microbatch 0.
pub(crate) fn as_given(num_buckets: usize, replicas: usize) -> Columns {
    (0..num_buckets).collect::<Vec<_>>().chunks(replicas).map(<[usize]>::to_vec).collect()
}

/// Puts buckets with similar LLM loads into one microbatch, so that its replicas reach the boundary at about the same time.
pub(crate) fn by_llm_load(llm_ns: &[u64], replicas: usize) -> Columns {
    let mut order: Vec<usize> = (0..llm_ns.len()).collect();
    order.sort_by_key(|&bucket| (Reverse(llm_ns[bucket]), bucket));
    spread(order.chunks(replicas).map(<[usize]>::to_vec).collect(), llm_ns, replicas)
}

/// Deals the buckets to and fro over the microbatches, in order of encoder load. The encoder runs all buckets of a
/// microbatch, so this makes its microbatches even.
pub(crate) fn by_encoder_load(encoder_ns: &[u64], llm_ns: &[u64], replicas: usize) -> Columns {
    let num_columns = encoder_ns.len() / replicas;
    let mut order: Vec<usize> = (0..encoder_ns.len()).collect();
    order.sort_by_key(|&bucket| (Reverse(encoder_ns[bucket]), Reverse(llm_ns[bucket]), bucket));
    let mut columns = vec![Vec::with_capacity(replicas); num_columns];
    for (round, buckets) in order.chunks(num_columns.max(1)).enumerate() {
        for (position, &bucket) in buckets.iter().enumerate() {
            let column = if round % 2 == 0 { position } else { num_columns - 1 - position };
            columns[column].push(bucket);
        }
    }
    spread(columns, llm_ns, replicas)
}

/// Within each microbatch, gives the heaviest bucket to the replica that has least work so far. So the replicas also have
/// even sums, because they wait for each other at the end of the step.
fn spread(mut columns: Columns, llm_ns: &[u64], replicas: usize) -> Columns {
    let mut total_ns = vec![0u64; replicas];
    for column in &mut columns {
        column.sort_by_key(|&bucket| (Reverse(llm_ns[bucket]), bucket));
        let mut free: Vec<usize> = (0..replicas).collect();
        free.sort_by_key(|&replica| (total_ns[replica], replica));
        let mut placed = vec![0; replicas];
        for (&bucket, replica) in column.iter().zip(free) {
            placed[replica] = bucket;
            total_ns[replica] += llm_ns[bucket];
        }
        *column = placed;
    }
    columns
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn like_loads_meet_and_totals_even_out() {
        // Sorted: 9 8 | 5 1. The replica that got 9 gets 1.
        assert_eq!(by_llm_load(&[1, 9, 5, 8], 2), [[1, 3], [0, 2]]);
    }

    #[test]
    fn encoder_loads_are_dealt_to_and_fro() {
        // Descending 8 6 | 4 1 with two columns: {8, 1} and {6, 4}.
        let columns = by_encoder_load(&[8, 6, 4, 1], &[0; 4], 2);
        let loads: Vec<u64> = columns.iter().map(|c| c.iter().map(|&b| [8, 6, 4, 1][b]).sum()).collect();
        assert_eq!(loads, [9, 10]);
    }

    proptest! {
        #[test]
        fn every_bucket_has_one_number(
            loads in prop::collection::vec((0u64..50, 0u64..50), 1..40), replicas in 1usize..5
        ) {
            let kept = loads.len() / replicas * replicas;
            let (encoder, llm): (Vec<u64>, Vec<u64>) = loads[..kept].iter().copied().unzip();
            let all = [
                as_given(kept, replicas),
                by_llm_load(&llm, replicas),
                by_encoder_load(&encoder, &llm, replicas),
            ];
            for columns in all {
                prop_assert!(columns.iter().all(|column| column.len() == replicas));
                let mut buckets: Vec<usize> = columns.into_iter().flatten().collect();
                buckets.sort_unstable();
                prop_assert_eq!(buckets, (0..kept).collect::<Vec<_>>());
            }
        }
    }
}
