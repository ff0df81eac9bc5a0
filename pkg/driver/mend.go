package driver

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
)

// namedSpecs is how many specs an Event names that were written again: the whole directory may have been removed.
const namedSpecs = 5

// mend puts specs back that someone removed or altered. Its error may pass: claims that have no spec until somebody acts are no reason to try again. What needs
// the hardware goes on when it has returned.
func (d *Driver) mend(ctx context.Context) error {
	if d.superseded.Load() {
		return nil
	}
	done, ok := d.release.Use()
	defer done()
	if !ok {
		d.unmended.Store(true) // claims may have to be asked the hardware about
		return nil
	}
	var err error
	if s := d.inv.Snapshot(); s.Ready {
		err = d.specs.WriteBase(s.Node.Common)
	}
	err = errors.Join(err, d.mender.Mend(ctx))
	passing := prepare.Passing(err)
	if err != nil && passing == nil {
		klog.FromContext(ctx).Error(err, "Claims have no CDI spec until somebody acts; all others have theirs")
	}
	return passing
}

// mended tells of specs that were written again after someone had removed or altered them.
func (d *Driver) mended(ctx context.Context, specs []string) {
	const what = "Wrote CDI specs again that someone else had removed or altered"
	klog.FromContext(ctx).Info(what, "specs", specs)
	object := strings.Join(specs[:min(len(specs), namedSpecs)], ", ")
	if more := len(specs) - namedSpecs; more > 0 {
		object += fmt.Sprintf(" and %d more", more)
	}
	d.repaired(prepare.Repair{Kind: "cdi-spec", What: what, Object: object})
}

// claimMender writes the specs of prepared claims again: at once where nothing has to be waited for, else beside the caller, each claim's by itself. So a GPU
// that hangs keeps no spec missing but those of its own claims.
type claimMender struct {
	claims interface {
		MendSeen(ctx context.Context) (left []types.UID, _ error)
		MendUnseen(ctx context.Context, claim types.UID) error
	}
	// use is to be called before the hardware is used; ok is false while it may not be, of which off is told.
	use func() (done func(), ok bool)
	off func()
	// failed is told when a claim could not be mended: whoever compares records and hardware tries that again.
	failed func()
	// left never has a claim twice, nor gives it out again before it is done with.
	left workqueue.TypedInterface[types.UID]
}

// Mend does what can be done at once.
func (m *claimMender) Mend(ctx context.Context) error {
	left, err := m.claims.MendSeen(ctx)
	for _, uid := range left {
		m.left.Add(uid)
	}
	return err
}

// Run does the rest until the context ends.
func (m *claimMender) Run(ctx context.Context) {
	defer context.AfterFunc(ctx, m.left.ShutDown)()
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		uid, ended := m.left.Get()
		if ended {
			return
		}
		wg.Go(func() {
			defer m.left.Done(uid)
			m.mend(ctx, uid)
		})
	}
}

func (m *claimMender) mend(ctx context.Context, uid types.UID) {
	done, ok := m.use()
	defer done()
	if !ok {
		m.off()
		return
	}
	if err := m.claims.MendUnseen(ctx, uid); err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).Error(err, "Could not write the claim's CDI spec again; the next comparison of records and hardware tries that too", "claimUID", uid)
		m.failed()
	}
}
