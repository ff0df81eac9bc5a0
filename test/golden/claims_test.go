package golden

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nodeharness"
)

const (
	driverName = "gpu.nvidia.com"
	gpu0       = "gpu-0000-1b-00-0"
	gpu1       = "gpu-0000-43-00-0"
	// patience is how long a test waits for the plugin to write a status or a ResourceSlice before it
	// fails.
	patience = 20 * time.Second
)

type result = resourceapi.DeviceRequestAllocationResult

func on(device string) result {
	return result{Request: "gpu", Driver: driverName, Pool: nodeharness.Pool, Device: device}
}

// share returns an allocation result for a part of a device that several claims share. amounts
// alternates between a capacity's name and the allocated amount of it.
func share(device string, amounts ...string) result {
	r := on(device + "-share")
	r.ShareID = ptr.To(types.UID("11111111-2222-3333-4444-555555555555"))
	r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{}
	for pair := range slices.Chunk(amounts, 2) {
		r.ConsumedCapacity[resourceapi.QualifiedName(pair[0])] = resource.MustParse(pair[1])
	}
	return r
}

func admin(r result) result {
	r.AdminAccess = ptr.To(true)
	return r
}

// claims are allocated on a node with two H100s. The test prepares and unprepares each before the
// next.
var claims = []struct {
	name    string
	devices []result
	config  string // the opaque configuration, without apiVersion; empty means none
}{
	{"whole-gpu", []result{on(gpu0)}, ""},
	{"two-gpus", []result{on(gpu0), on(gpu1)}, ""},
	{"partition", []result{on(gpu0 + "-mig-19-0")}, ""},
	{"partition-half", []result{on(gpu1 + "-mig-9-4")}, ""},
	{"partition-and-gpu", []result{on(gpu0 + "-mig-14-2"), on(gpu1)}, ""},
	{"time-sliced", []result{on(gpu0)},
		`"kind":"GpuConfig","sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}`},
	{"mps", []result{on(gpu0)}, `"kind":"GpuConfig","sharing":{"strategy":"MPS"}`},
	{"mps-limited", []result{on(gpu0), on(gpu1)},
		`"kind":"GpuConfig","sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":50,` +
			`"defaultPinnedDeviceMemoryLimit":"10Gi","defaultPerDevicePinnedMemoryLimit":{"1":"5Gi"}}}`},
	{"mps-partition", []result{on(gpu0 + "-mig-19-3")}, `"kind":"MigDeviceConfig","sharing":{"strategy":"MPS"}`},
	{"plain-share", []result{share(gpu0, "shares", "1")}, ""},
	{"plain-share-of-partition", []result{share(gpu0+"-mig-19-0", "shares", "1")}, ""},
	{"fraction", []result{share(gpu0, "memory", "8Gi", "cores", "20")}, ""},
	{"fraction-of-partition", []result{share(gpu0+"-mig-9-0", "memory", "8Gi", "cores", "20")}, ""},
	{"admin-access", []result{admin(on(gpu0)), admin(on(gpu1))}, ""},
}

// For each claim, the driver must give the answer, CDI specs, MPS daemons and status recorded in
// testdata. TestClaims runs the whole driver in this process and calls it on its socket, as the
// kubelet does. The API server and the MPS supervisor are fakes.
func TestClaims(t *testing.T) {
	needSimulator(t)
	golden := newFiles(t, "claims")
	h := nodeharness.New(t, "0000:1b:00.0", "0000:43:00.0")
	t.Setenv("NVMLSIM_DEV", filepath.Join(h.Root, "driver", "dev"))
	installSMI(t, h.Root)
	daemons := superviseMPS(t, filepath.Join(h.Config().PluginDir, "mps"))
	api := nodeharness.NewAPI()
	running, err := h.Start(t.Context(), api)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := running.Stop(); err != nil {
			t.Error(err)
		}
	})
	kubelet := dialKubelet(t, h.Config().PluginDir)
	n := node{host: h, api: api, kubelet: kubelet, daemons: daemons, golden: golden}
	golden.check(t, "published.yaml", n.published(t))
	for _, c := range claims {
		t.Run(c.name, func(t *testing.T) { n.prepare(t, claim(c.name, c.config, c.devices)) })
	}
}

// node is a simulated host with the running driver, and with fakes of what the driver talks to.
type node struct {
	host    nodeharness.Node
	api     nodeharness.API
	kubelet drapb.DRAPluginClient
	daemons *supervisor
	golden  *files
}

// prepare prepares and unprepares one claim. It fails the test if the answer, the CDI specs, the
// MPS daemon or the claim's status differ from the golden files.
func (n node) prepare(t *testing.T, c *resourceapi.ResourceClaim) {
	t.Helper()
	if err := n.api.Allocate(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	asked := []*drapb.Claim{{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}}
	var devices []*drapb.Device
	eventually(t, "claim "+c.Name+" is prepared", func() error {
		answer, err := n.kubelet.NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: asked})
		if err != nil {
			return err
		}
		of := answer.GetClaims()[string(c.UID)]
		if of.GetError() != "" {
			return errors.New(of.GetError())
		}
		devices = of.GetDevices()
		return nil
	})
	n.checkJSON(t, c.Name, "answer.json", devices)
	n.checkSpecs(t, c)
	if requests := n.daemons.take(); len(requests) > 0 {
		n.checkJSON(t, c.Name, "mps-daemons.json", requests)
	}
	n.checkJSON(t, c.Name, "status.json", n.status(t, c))

	answer, err := n.kubelet.NodeUnprepareResources(t.Context(), &drapb.NodeUnprepareResourcesRequest{Claims: asked})
	if err != nil {
		t.Fatal(err)
	}
	if of := answer.GetClaims()[string(c.UID)]; of.GetError() != "" {
		t.Error(of.GetError())
	}
	if err := n.api.Free(t.Context(), c); err != nil {
		t.Error(err)
	}
	if left, _ := filepath.Glob(filepath.Join(n.host.Config().CDIRoot, "*"+string(c.UID)+"*")); len(left) > 0 {
		t.Errorf("after Unprepare there are still %v", left)
	}
	n.daemons.take()
}

// checkSpecs fails the test if the CDI spec of claim c, or the base CDI spec for all claims,
// differs from its golden file.
func (n node) checkSpecs(t *testing.T, c *resourceapi.ResourceClaim) {
	t.Helper()
	dir := n.host.Config().CDIRoot
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), ".json") {
			continue
		}
		text, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		folder := ""
		if strings.Contains(e.Name(), string(c.UID)) {
			folder = c.Name
		}
		n.checkJSON(t, folder, e.Name(), json.RawMessage(text))
	}
}

// status waits until the driver has written the claim's status.devices, and returns it without the
// times, which differ in each run.
func (n node) status(t *testing.T, c *resourceapi.ResourceClaim) []resourceapi.AllocatedDeviceStatus {
	t.Helper()
	var devices []resourceapi.AllocatedDeviceStatus
	eventually(t, "claim "+c.Name+" has its status", func() error {
		now, err := n.api.ResourceV1().ResourceClaims(c.Namespace).Get(t.Context(), c.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		devices = now.Status.Devices
		if len(devices) != len(c.Status.Allocation.Devices.Results) {
			return fmt.Errorf("it has %d entries", len(devices))
		}
		return nil
	})
	for i := range devices {
		for j := range devices[i].Conditions {
			devices[i].Conditions[j].LastTransitionTime = metav1.Time{}
		}
	}
	return devices
}

// published returns the specs of the driver's ResourceSlices as YAML. It sorts them, because the
// slices' names end in random letters.
func (n node) published(t *testing.T) []byte {
	t.Helper()
	var published []resourceapi.ResourceSlice
	eventually(t, "the driver has published its slices", func() error {
		list, err := n.api.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		published = list.Items
		if len(published) == 0 || int64(len(published)) != published[0].Spec.Pool.ResourceSliceCount {
			return fmt.Errorf("there are %d", len(published))
		}
		return nil
	})
	var specs []string
	for i := range published {
		published[i].Spec.Pool.Generation = 0
		text, err := yaml.Marshal(published[i].Spec)
		if err != nil {
			t.Fatal(err)
		}
		specs = append(specs, string(text))
	}
	slices.Sort(specs)
	return []byte("---\n" + strings.Join(specs, "---\n"))
}

// checkJSON compares the value, as indented JSON, with the golden file folder/name.
func (n node) checkJSON(t *testing.T, folder, name string, value any) {
	t.Helper()
	raw, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	var text bytes.Buffer
	if err := json.Indent(&text, raw, "", "  "); err != nil {
		t.Fatal(err)
	}
	text.WriteByte('\n')
	n.golden.check(t, filepath.Join(folder, name), n.fixed(text.Bytes()))
}

// capsMajor is the major number of capability device nodes, which the simulator chooses among those
// that the machine's kernel does not use.
var capsMajor = regexp.MustCompile(`"major": [0-9]+`)

// fixed replaces what differs between runs and machines: the path of the simulated host's folder
// with /golden, and major numbers with 0.
func (n node) fixed(text []byte) []byte {
	text = capsMajor.ReplaceAll(text, []byte(`"major": 0`))
	return bytes.ReplaceAll(text, []byte(n.host.Root), []byte("/golden"))
}

// claim returns a claim to which the devices are allocated, with the opaque configuration config
// for all of them.
func claim(name, config string, devices []result) *resourceapi.ResourceClaim {
	c := nodeharness.Claim(name)
	for i := range devices {
		d := devices[i]
		d.Request = fmt.Sprintf("%s-%d", d.Request, i)
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, d)
	}
	if config != "" {
		c.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{{
			Source: resourceapi.AllocationConfigSourceClaim,
			DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
				Driver:     driverName,
				Parameters: runtime.RawExtension{Raw: []byte(`{"apiVersion":"resource.nvidia.com/v1beta1",` + config + `}`)},
			}},
		}}
	}
	return c
}

// installSMI installs a fake nvidia-smi that only stores the time slice that the driver sets.
func installSMI(t *testing.T, root string) {
	t.Helper()
	script := fmt.Sprintf(`#!/bin/sh
for argument; do
	case $argument in
	--set-timeslice=0) echo Default >%[1]s ;;
	--set-timeslice=1) echo Short >%[1]s ;;
	--set-timeslice=2) echo Medium >%[1]s ;;
	--set-timeslice=3) echo Long >%[1]s ;;
	esac
done
echo "| 0 | timeslice | $(cat %[1]s) |"
`, filepath.Join(root, "timeslice"))
	err := errors.Join(
		os.WriteFile(filepath.Join(root, "timeslice"), []byte("Default\n"), 0o600),
		os.WriteFile(filepath.Join(root, "driver", "usr", "bin", "nvidia-smi"), []byte(script), 0o700),
	)
	if err != nil {
		t.Fatal(err)
	}
}

// dialKubelet connects to the driver's socket in dir, as the kubelet does.
func dialKubelet(t *testing.T, dir string) drapb.DRAPluginClient {
	t.Helper()
	var sockets []string
	eventually(t, "the driver serves", func() error {
		sockets, _ = filepath.Glob(filepath.Join(dir, "*.sock"))
		if len(sockets) != 1 {
			return fmt.Errorf("its sockets are %v", sockets)
		}
		return nil
	})
	conn, err := grpc.NewClient("unix://"+sockets[0], grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return drapb.NewDRAPluginClient(conn)
}

// supervisor is a fake MPS supervisor. Every daemon that the driver requests is ready at once.
type supervisor struct {
	lock     sync.Mutex
	dir      string
	requests []json.RawMessage
	daemons  map[string]json.RawMessage
}

// superviseMPS starts the fake MPS supervisor on its socket in dir. Like the real one, it creates
// folders for each daemon below dir.
func superviseMPS(t *testing.T, dir string) *supervisor {
	t.Helper()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	listener, err := new(net.ListenConfig).Listen(t.Context(), "unix", filepath.Join(dir, "supervisor_socket"))
	if err != nil {
		t.Fatal(err)
	}
	s := &supervisor{dir: dir, daemons: map[string]json.RawMessage{}}
	server := &http.Server{Handler: s, ReadHeaderTimeout: patience}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = server.Serve(listener)
	}()
	t.Cleanup(func() {
		_ = server.Shutdown(context.Background())
		<-ended
	})
	return s
}

func (s *supervisor) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.lock.Lock()
	defer s.lock.Unlock()
	id := strings.Trim(strings.TrimPrefix(r.URL.Path, "/v1/daemons"), "/")
	switch r.Method {
	case http.MethodPut:
		body, err := io.ReadAll(r.Body)
		for _, dir := range []string{"pipe", "log", "shm"} {
			err = errors.Join(err, os.MkdirAll(filepath.Join(s.dir, id, dir), 0o700))
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		if !bytes.Equal(s.daemons[id], body) {
			s.requests = append(s.requests, body)
		}
		s.daemons[id] = body
	case http.MethodDelete:
		delete(s.daemons, id)
	case http.MethodGet:
		type status struct {
			Daemon json.RawMessage `json:"daemon"`
			State  string          `json:"state"`
		}
		all := []status{}
		for _, d := range s.daemons {
			all = append(all, status{d, "Ready"})
		}
		_ = json.NewEncoder(w).Encode(all)
	}
}

// take returns the daemons that the driver has requested since the last call.
func (s *supervisor) take() []json.RawMessage {
	s.lock.Lock()
	defer s.lock.Unlock()
	taken := s.requests
	s.requests = nil
	return taken
}

// eventually calls the function wrong until it returns nil. If that takes longer than patience, it
// fails the test with the last error.
func eventually(t *testing.T, what string, wrong func() error) {
	t.Helper()
	late := time.After(patience)
	for {
		err := wrong()
		if err == nil {
			return
		}
		select {
		case <-late:
			t.Fatalf("wait until %s: %v", what, err)
		case <-time.After(200 * time.Millisecond):
		}
	}
}
