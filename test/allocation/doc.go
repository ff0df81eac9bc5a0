// Package allocation has one test: what the scheduler's allocator gives, of the slices that we publish, the simulated hardware can always be cut into, and
// what the allocator refuses the hardware cannot be cut into, whatever came before.
//
// The GPUs are found by the plugin's own scan. Everything that is given is really made, by calls to the simulated library, and destroyed when it is freed;
// of everything that is refused every way to make it is really tried. No rule of the hardware stands in this package. What several claims share is made by the
// first, and taken away by the last; how much each holds is added up by what is published of it, and never more than the hardware has.
package allocation
