// Package stand puts the parts of a trial together: the simulated GPU driver, the cluster whose nodes have it, the image and the chart. The
// demonstration and the end-to-end tests stand on it, so that what is shown is what is tested.
//
// It only builds and describes; it owns no process and no state, so that whoever brings a cluster up is the one who takes it down.
package stand
