// Package claim reads an allocated ResourceClaim: which devices of ours it got, for which requests, and with which configuration.
//
// It promises to see only what is this driver's (results and configuration of other drivers in the same claim are skipped) and to settle each
// result's effective configuration: one of the claim beats one of the DeviceClass, a later one beats an earlier one, and one that names a request also
// holds for its subrequests. What comes out is decoded, completed and validated. Results that take one and the same configuration form a group; of a share it is
// said which capacities it has, as the scheduler wrote them.
//
// It is pure. It does not know which devices the node has, nor what can be done with them.
package claim
