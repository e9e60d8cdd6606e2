//! Search: profiles and cluster in, ranked plans out.
