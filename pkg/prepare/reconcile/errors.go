package reconcile

import (
	"errors"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
)

// LostDevices returns the [prepare.LostError]s in err, which [Reconciler.Reconcile] returned.
func LostDevices(err error) (lost []*prepare.LostError) {
	var joined interface{ Unwrap() []error }
	if errors.As(err, &joined) {
		for _, e := range joined.Unwrap() {
			lost = append(lost, LostDevices(e)...)
		}
	} else if one, ok := errors.AsType[*prepare.LostError](err); ok {
		lost = append(lost, one)
	}
	return lost
}
