package driver

import (
	"context"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/claimstatus"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metadata"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/scan"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/ledger"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/reconcile"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// transaction prepares, unprepares and repairs the node's claims. Its parts work on the same
// records.
type transaction struct {
	*prepare.Preparer
	*reconcile.Reconciler
	*ledger.Ledger
	steps.Node
}

func newTransaction(o prepare.Options) transaction {
	o.Ledger = ledger.New(o.Node.Records, o.Node.BootID, o.Node.Hardware)
	p := prepare.New(o)
	return transaction{p, reconcile.New(p, o), o.Ledger, o.Node}
}

// conflictWait is how long a Prepare waits for a device that another claim has. It is shorter than
// the pause before the kubelet's retry. It is long enough if the other claim's Pod exits on
// request, has a short grace period or was deleted by force.
const conflictWait = 10 * time.Second

// claimReader implements [prepare.Claims].
type claimReader struct {
	*inFlightCalls
	client kubernetes.Interface
}

func (r claimReader) Read(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error) {
	return r.client.ResourceV1().ResourceClaims(namespace).Get(ctx, name, metav1.GetOptions{})
}

// claimObserver implements [prepare.Observer].
type claimObserver struct {
	calls *inFlightCalls
	*claimstatus.Reporter
	reports
}

// Unprepared removes what the plugin remembers about a claim. The caller still holds the claim's
// lock, so a later Prepare of the same claim begins after this cleanup.
func (o claimObserver) Unprepared(uid types.UID) {
	o.calls.Unprepared(uid)
	o.ForgetLost(uid)
}

// nodeEdits implements [prepare.Edits].
type nodeEdits struct {
	cdi.Mapper
	*metadata.Files
	cfg         *config.Config
	requestScan func()
}

// Verify implements [prepare.Edits]. If a file is missing it requests a scan, because the
// fingerprint does not cover every file. The scan drops the file, unless CUDA needs it.
func (e nodeEdits) Verify(edits specs.ContainerEdits) error {
	err := e.Mapper.Verify(edits)
	if err != nil {
		e.requestScan()
	}
	return err
}

func (e nodeEdits) MIG(parent specs.ContainerEdits, in device.Instance, c device.ComputeInstance) specs.ContainerEdits {
	return scan.CapabilityEdits(Paths(e.cfg), parent, in, c)
}

func (e nodeEdits) Binding(a device.PCIAddress) string { return scan.Binding(e.cfg.SysfsRoot, a) }

func (e nodeEdits) Monitor() specs.ContainerEdits { return scan.MonitorEdits(Paths(e.cfg)) }

func (e nodeEdits) MPSClient(daemon string) specs.ContainerEdits {
	return mps.Edits(MPSPaths(e.cfg), daemon)
}

func (e nodeEdits) MemoryLimit(gpuUUID string, minor int, mebibytes uint64) specs.ContainerEdits {
	roots := mps.Roots{Driver: e.cfg.DriverRoot, Cgroups: e.cfg.CgroupRoot}
	return mps.LimitEdits(roots, e.cfg.MPSHookPath(), gpuUUID, minor, mebibytes)
}
