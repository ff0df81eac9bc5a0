package schedules

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"k8s.io/apimachinery/pkg/types"
	upstream "k8s.io/dynamic-resource-allocation/api/metadata"
	"k8s.io/dynamic-resource-allocation/devicemetadata"
	"k8s.io/utils/ptr"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metadata"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// cdiDir is the simulated node's CDI directory, from which the container runtime reads specs.
type cdiDir interface {
	// open returns the directory's spec store for a new plugin process.
	open() steps.Specs
	// partial leaves the unfinished file of a process that was killed while it wrote the claim's spec.
	partial(uid types.UID)
	// of returns the devices in the CDI spec of the claim with this UID, or nil if the claim has no
	// spec.
	of(uid types.UID) ([]specs.Device, error)
	// described returns the UUIDs of the claim's devices that the claim's metadata files name, by
	// device.
	described(uid types.UID) map[string]string
	hasBase() bool
	// files lists all files except the base spec.
	files() []string
	// remove removes a claim's spec, as an admin would.
	remove(uid types.UID)
	// clear empties the directory, as a reboot does, because it is on tmpfs.
	clear() error
}

// realSpecs uses the plugin's own spec store in a real directory, and its own metadata files in
// another one.
type realSpecs struct{ dir, metadata string }

var (
	_ cdiDir = realSpecs{}
	_ cdiDir = &inMemory{}
)

func (s realSpecs) path(uid types.UID) string {
	return filepath.Join(s.dir, cdi.Vendor+"-claim_"+string(uid)+".json")
}

func (s realSpecs) open() steps.Specs {
	return metadata.WithSpecs{Store: cdi.NewStore(s.dir), Files: metadata.NewFiles(s.metadata)}
}

func (s realSpecs) partial(uid types.UID) {
	path := s.path(uid)
	_ = os.WriteFile(filepath.Join(s.dir, "."+filepath.Base(path)+".tmp-claim"), []byte(`{"cdiVersion"`), 0o600)
}

func (s realSpecs) of(uid types.UID) ([]specs.Device, error) {
	raw, err := os.ReadFile(s.path(uid))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var spec specs.Spec
	if err == nil {
		err = json.Unmarshal(raw, &spec)
	}
	return spec.Devices, err
}

func (s realSpecs) described(uid types.UID) map[string]string {
	files, _ := filepath.Glob(filepath.Join(s.metadata, string(uid)+"_*.json"))
	var requests []metadata.Request
	for _, name := range files {
		var m upstream.DeviceMetadata
		raw, err := os.ReadFile(name)
		if err == nil {
			err = devicemetadata.DecodeMetadataFromStream(json.NewDecoder(bytes.NewReader(raw)), &m)
		}
		if err != nil {
			return map[string]string{}
		}
		requests = append(requests, m.Requests...)
	}
	return uuidsIn(requests)
}

func uuidsIn(requests []metadata.Request) map[string]string {
	uuids := map[string]string{}
	for _, r := range requests {
		for _, d := range r.Devices {
			uuids[d.Name] = ptr.Deref(d.Attributes["uuid"].StringValue, "")
		}
	}
	return uuids
}

func (s realSpecs) base() string { return cdi.Vendor + "-base.json" }

func (s realSpecs) hasBase() bool {
	_, err := os.Stat(filepath.Join(s.dir, s.base()))
	return err == nil
}

func (s realSpecs) files() []string {
	entries, _ := os.ReadDir(s.dir)
	var names []string
	for _, e := range entries {
		if e.Name() != s.base() {
			names = append(names, e.Name())
		}
	}
	left, _ := filepath.Glob(filepath.Join(s.metadata, "*"))
	return append(names, left...)
}

func (s realSpecs) remove(uid types.UID) { _ = os.Remove(s.path(uid)) }

func (s realSpecs) clear() error { return errors.Join(os.RemoveAll(s.dir), os.Mkdir(s.dir, 0o700)) }

// inMemory fakes the spec store. It keeps specs and metadata in memory, which is fast and easy to
// copy.
type inMemory struct {
	claims   map[types.UID][]specs.Device
	metadata map[types.UID][]metadata.Request
	based    bool
}

func newInMemory() *inMemory {
	return &inMemory{claims: map[types.UID][]specs.Device{}, metadata: map[types.UID][]metadata.Request{}}
}

func (s *inMemory) open() steps.Specs { return s }

func (s *inMemory) partial(types.UID) {}

func (s *inMemory) of(uid types.UID) ([]specs.Device, error) { return s.claims[uid], nil }

func (s *inMemory) described(uid types.UID) map[string]string { return uuidsIn(s.metadata[uid]) }

func (s *inMemory) hasBase() bool { return s.based }

func (s *inMemory) files() []string {
	var names []string
	for uid := range s.claims {
		names = append(names, string(uid))
	}
	for uid := range s.metadata {
		names = append(names, "metadata of "+string(uid))
	}
	slices.Sort(names)
	return names
}

func (s *inMemory) remove(uid types.UID) { delete(s.claims, uid) }

func (s *inMemory) clear() error {
	clear(s.claims)
	s.based = false
	return nil
}

// EnsureBase notes that the base spec, which all claims share, exists.
func (s *inMemory) EnsureBase(specs.ContainerEdits, func(specs.ContainerEdits) error) error {
	s.based = true
	return nil
}

// WriteClaim stores a claim's spec.
func (s *inMemory) WriteClaim(uid types.UID, devices []specs.Device) error {
	s.claims[uid] = devices
	return nil
}

// WriteMetadata stores what the files of the requests say.
func (s *inMemory) WriteMetadata(c metadata.Claim, requests []metadata.Request) error {
	for _, r := range requests {
		others := slices.DeleteFunc(slices.Clone(s.metadata[c.UID]), func(there metadata.Request) bool { return there.Name == r.Name })
		s.metadata[c.UID] = append(others, r)
	}
	return nil
}

// RemoveClaim removes a claim's spec and metadata.
func (s *inMemory) RemoveClaim(uid types.UID) error {
	delete(s.claims, uid)
	delete(s.metadata, uid)
	return nil
}

// Claims lists the UIDs of the claims that have a spec or metadata.
func (s *inMemory) Claims() ([]types.UID, error) {
	all := slices.AppendSeq(slices.Collect(maps.Keys(s.claims)), maps.Keys(s.metadata))
	slices.Sort(all)
	return slices.Compact(all), nil
}
