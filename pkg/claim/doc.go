// Package claim reads from an allocated ResourceClaim which of the driver's devices it has, for
// which requests, and with which configuration.
//
// It skips results and configurations of other drivers. It decides which configuration applies to
// a result:
//   - The claim's configuration overrides the DeviceClass's.
//   - A later configuration overrides an earlier one.
//   - A configuration that names a request also applies to the request's subrequests.
//
// The package decodes configurations, fills in their defaults and validates them. Results that use
// the same configuration entry form a group.
//
// The package needs only the claim. It does not know which devices the node has, nor what they
// support.
package claim
