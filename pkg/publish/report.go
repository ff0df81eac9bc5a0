package publish

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
)

// reportError logs and counts an error that the publisher retries. If the API server rejected an
// object as invalid, a retry does not help, so an Event tells the admin.
func (p *Publisher) reportError(ctx context.Context, err error, msg string) {
	klog.FromContext(ctx).Error(err, msg)
	p.opts.Metrics.PublishError()
	if !apierrors.IsInvalid(err) {
		return
	}
	what := "this node's ResourceSlices"
	if errors.As(err, new(probeError)) {
		what = "the plugin's test slices (dry run)"
	}
	p.opts.Events.Event(events.SlicesRejected, "The API server rejects "+what+": "+rejection(err)+
		". Look for an admission policy that refuses them. If there is none, report a bug")
}

// probeError is an API server's error for a test slice, in contrast to one for a real slice.
type probeError struct{ error }

func (e probeError) Unwrap() error { return e.error }

// shownCauses is how many causes of a rejection an Event names. Each of a slice's 64 devices may
// have one.
const shownCauses = 3

// rejection returns why the API server rejects an object as invalid. It omits the object's
// generated name, because repeated Events about the same cause must have the same message.
func rejection(err error) string {
	var status apierrors.APIStatus
	if !errors.As(err, &status) || status.Status().Details == nil {
		return err.Error()
	}
	var reasons []string
	for _, cause := range status.Status().Details.Causes {
		reason := cause.Message
		if cause.Field != "" {
			reason = cause.Field + ": " + reason
		}
		reasons = append(reasons, reason)
	}
	if more := len(reasons) - shownCauses; more > 0 {
		reasons = append(slices.Clip(reasons[:shownCauses]), fmt.Sprintf("and %d more", more))
	}
	if len(reasons) == 0 {
		return status.Status().Message
	}
	return strings.Join(reasons, "; ")
}
