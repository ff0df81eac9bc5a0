package prometheus

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"
	"text/template"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nodeharness"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

func TestMain(m *testing.M) { os.Exit(nodeharness.Main(m, nil)) }

const (
	partitioned, shared = "gpu-0000-1b-00-0", "gpu-0000-43-00-0"
	held, free          = "gpu-0000-52-00-0", "gpu-0000-61-00-0"
	freeIndex           = 3
	// An XID after which a GPU must be reset, and NVML's codes for its recovery action.
	fatalXID               = 95
	actionNone, resetAsked = 0, 1
)

// The plugin runs on a node with four H100s under load. Prometheus scrapes it and dcgm-exporter.
// Then a GPU fails and recovers.
func TestRealPrometheusOnRealPlugin(t *testing.T) {
	n := nodeharness.New(t, "0000:1b:00.0", "0000:43:00.0", "0000:52:00.0", "0000:61:00.0")
	api := nodeharness.NewAPI()
	cfg := n.Config()
	cfg.Settings.Shares = []device.ShareRule{{GPUs: "0000:43:00.0", Kind: device.KindShares, Count: 4}}
	d, err := n.StartWatching(context.WithoutCancel(t.Context()), api, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Stop(); err != nil {
			t.Error(err)
		}
	})
	plugin := httptest.NewServer(promhttp.HandlerFor(d.Registry, promhttp.HandlerOpts{}))
	exporter := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { serveDCGM(t, n, w, r) }))
	t.Cleanup(plugin.Close)
	t.Cleanup(exporter.Close)
	s := start(t, nodeharness.Pool, map[string]*httptest.Server{job: plugin, "dcgm-exporter": exporter})

	prepareLoad(t, d, api)
	eventually(t, "each claim has its activity", func() string {
		return s.differs(t, joinOf(t, "Activity of each claim's devices"), map[string]float64{
			`claim="batch" pod="batch-0" device=` + partitioned + "-mig-9-4":  0.02,
			`claim="train" pod="train-0" device=` + partitioned + "-mig-19-0": 0.07,
			`claim="serve" pod="" device=` + held:                             0.5,
			`claim="share" pod="" device=` + shared:                           0.5,
		})
	})
	eventually(t, "what is free is known", func() string {
		return s.differs(t, `sum by (device, profile) ({__name__=~"gpu_dra_largest_free_profile_bytes|gpu_dra_free_gpus"})`, nil)
	})
	if alerts := s.firing(); len(alerts) > 0 {
		t.Errorf("alerts on a healthy node: %v", alerts)
	}

	change(t, n, func(f *state.File) error { return f.XID(freeIndex, fatalXID) })
	want := fmt.Sprintf("GPUDRADeviceUnhealthy %s xid-%d", free, fatalXID)
	eventually(t, "the alert fires", func() string {
		if alerts := s.firing(); !slices.Equal(alerts, []string{want}) {
			return fmt.Sprint(alerts)
		}
		return ""
	})
	for _, p := range panels(t, nodeharness.Pool) {
		eventually(t, p.dashboard+": "+p.title, func() string {
			values, err := s.query(t, p.query)
			if err != nil || len(values) == 0 {
				return fmt.Sprintf("%v, %d values of %s", err, len(values), p.query)
			}
			return ""
		})
	}
	for _, a := range s.alerts.AlertingRules() {
		if a.LastError() != nil || a.GetEvaluationTimestamp().IsZero() {
			t.Errorf("alert %s: evaluated %s, %v", a.Name(), a.GetEvaluationTimestamp(), a.LastError())
		}
	}

	change(t, n, func(f *state.File) error { return f.AnnounceRecovery(freeIndex, resetAsked) })
	eventually(t, "the plugin knows that the GPU needs a reset", func() string {
		values, err := s.query(t, `gpu_dra_health_findings{code="recovery-gpu-reset"}`)
		if err != nil || len(values) == 0 {
			return fmt.Sprint(values, err)
		}
		return ""
	})
	change(t, n, func(f *state.File) error { return f.AnnounceRecovery(freeIndex, actionNone) })
	eventually(t, "the alert ends after the reset", func() string { return strings.Join(s.firing(), ", ") })
	values, err := s.query(t, `count({__name__=~"gpu_dra_.*"})`)
	t.Logf("time series of the plugin: %v, %v", values, err)
}

// prepareLoad prepares claims on three of the GPUs, as the kubelet would.
func prepareLoad(t *testing.T, d *nodeharness.Driver, api nodeharness.API) {
	t.Helper()
	batch, train := nodeharness.Claim("batch", partitioned+"-mig-9-4"), nodeharness.Claim("train", partitioned+"-mig-19-0")
	for _, c := range []*resourceapi.ResourceClaim{batch, train} {
		c.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: c.Name + "-0", Controller: ptr.To(true)}}
	}
	share := nodeharness.Claim("share", shared+"-share")
	result := &share.Status.Allocation.Devices.Results[0]
	result.ShareID = ptr.To(types.UID("11111111-2222-3333-4444-555555555555"))
	result.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"shares": resource.MustParse("1")}
	for _, c := range []*resourceapi.ResourceClaim{batch, train, nodeharness.Claim("serve", held), share} {
		if err := api.Allocate(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		eventually(t, "prepare "+c.Name, func() string {
			if err := d.Prepare(t.Context(), c); err != nil {
				return err.Error()
			}
			return ""
		})
	}
	if err := d.Prepare(t.Context(), nodeharness.Claim("broken", "gpu-0000-99-00-0")); err == nil {
		t.Error("a claim for a GPU that does not exist was prepared")
	}
}

func change(t *testing.T, n nodeharness.Node, edit func(*state.File) error) {
	t.Helper()
	if err := n.Change(edit); err != nil {
		t.Fatal(err)
	}
}

// joinOf returns the query of the node dashboard's panel with this title.
func joinOf(t *testing.T, title string) string {
	t.Helper()
	for _, p := range panels(t, nodeharness.Pool) {
		if p.title == title {
			return p.query
		}
	}
	t.Fatalf("no panel %q", title)
	return ""
}

// differs says how the query's result differs from want, whose keys have the labels claim, pod and
// device. Nil means any result.
func (s *server) differs(t *testing.T, query string, want map[string]float64) string {
	t.Helper()
	values, err := s.query(t, query)
	if err != nil || len(values) == 0 || want != nil && len(values) != len(want) {
		return fmt.Sprintf("%v, %s:\n%s", err, query, lines(values))
	}
	for key, value := range want {
		found := false
		for labels, got := range values {
			matches := true
			for _, label := range strings.Fields(strings.ReplaceAll(key, `"`, "")) {
				name, content, _ := strings.Cut(label, "=")
				absent := content == "" && !strings.Contains(labels, name+"=")
				matches = matches && (absent || strings.Contains(labels, fmt.Sprintf("%s=%q", name, content)))
			}
			found = found || matches && got == value
		}
		if !found {
			return fmt.Sprintf("no %s with %g in\n%s", key, value, lines(values))
		}
	}
	return ""
}

// serveDCGM answers as dcgm-exporter does.
func serveDCGM(t *testing.T, n nodeharness.Node, w http.ResponseWriter, r *http.Request) {
	t.Helper()
	type part struct {
		Profile string
		ID      uint32
	}
	type gpu struct {
		Index              int
		UUID, BusID, Model string
		Parts              []part
	}
	now, err := n.Scan(r.Context())
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	var gpus []gpu
	for i, g := range now.GPUs {
		one := gpu{Index: i, UUID: g.UUID, BusID: "0000" + strings.ToUpper(string(g.PCIAddress)), Model: g.ProductName}
		for _, in := range g.MIG.Instances {
			for _, c := range in.Compute {
				one.Parts = append(one.Parts, part{c.Name, in.ID})
			}
		}
		gpus = append(gpus, one)
	}
	w.Header().Set("Content-Type", "text/plain; version=0.0.4")
	if err := template.Must(template.ParseFiles("testdata/dcgm-exporter.txt")).Execute(w, gpus); err != nil {
		t.Error(err)
	}
}
