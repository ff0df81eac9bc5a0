package prepare

import (
	"context"
	"errors"
	"fmt"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
)

// Unprepare gives a claim's devices back. It needs no hardware that the record's steps do not need, and no GPU driver. A claim without a record is given
// back already.
func (p *Preparer) Unprepare(ctx context.Context, uid types.UID) error {
	held, err := p.lock(ctx, uid)
	if err != nil {
		return fmt.Errorf("claim with UID %s: %w", uid, err)
	}
	defer held.Release()
	r, found, err := p.Records.Load(uid)
	var unreadable *checkpoint.UnreadableError
	switch {
	case errors.As(err, &unreadable):
		return p.setAside(ctx, uid, unreadable)
	case err != nil:
		return because(CauseRecord, "%w", err)
	case !found:
		if err := p.Specs.RemoveClaim(uid); err != nil {
			return because(CauseStep, "claim with UID %s: %w", uid, err)
		}
		return nil
	}
	if err := lockGPUs(ctx, held, r.Holds()...); err != nil {
		return fmt.Errorf("claim %s/%s: %w", r.Namespace, r.Name, err)
	}
	return p.revert(ctx, r)
}
