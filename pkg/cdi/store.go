package cdi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/joint"
)

// The kinds of our specs are k8s.gpu.nvidia.com/base and k8s.gpu.nvidia.com/claim.
const (
	Vendor     = "k8s.gpu.nvidia.com"
	baseClass  = "base"
	claimClass = "claim"
	baseDevice = "driver"

	baseFile    = Vendor + "-" + baseClass + ".json"
	claimPrefix = Vendor + "-" + claimClass + "_"
	suffix      = ".json"
	temporary   = ".tmp-"
	// ofClaim ends the name of a claim's temporary file.
	ofClaim = temporary + "claim"
)

// Store is the CDI directory, as far as it is ours. Its methods may be called from several goroutines.
type Store struct {
	root string

	// files is read-locked by who changes one file and what is known of it, so that claims do not wait for each other's disk writes, and locked by who
	// compares all files with what is known. Calls for one claim follow each other; those for the base spec take baseMu.
	files  sync.RWMutex
	baseMu sync.Mutex
	bases  joint.Work[identity]

	mu sync.Mutex // guards what follows
	// known is what each file should hold: what we last wrote, or, for files of another instance of the plugin, what we found.
	// Watch compares it with the disk to tell strangers' changes from ours.
	known map[string][]byte
	// lost are the files that Watch has found removed or altered and that were not written since; mended are those that were, until Watch tells of them.
	lost   map[string]bool
	mended []string
	// base is the last base spec, and of what edits it was made: it is the same for every claim.
	base   []byte
	baseOf identity
}

// NewStore keeps specs in root, a directory that the container runtime reads, such as /var/run/cdi.
func NewStore(root string) *Store {
	return &Store{root: root, known: map[string][]byte{}, lost: map[string]bool{}}
}

// ClaimDevice is one device of a claim's spec.
type ClaimDevice struct {
	// Name is the part of the ID after the "=", as [ClaimDeviceName] makes it.
	Name  string
	Edits specs.ContainerEdits
}

// BaseID is the CDI device that stands for the node-wide edits.
func BaseID() string { return parser.QualifiedName(Vendor, baseClass, baseDevice) }

// ClaimDeviceName names a claim's device within its spec: <claim UID>-<device>, with -<share ID> if the claim holds only a share of it.
func ClaimDeviceName(uid types.UID, device string, shareID *types.UID) string {
	name := string(uid) + "-" + device
	if shareID != nil {
		name += "-" + string(*shareID)
	}
	return name
}

// ClaimDeviceID is the CDI device that stands for a claim's device.
func ClaimDeviceID(uid types.UID, device string, shareID *types.UID) string {
	return parser.QualifiedName(Vendor, claimClass, ClaimDeviceName(uid, device, shareID))
}

// WriteBase makes edits those of the base spec. They are the spec's, not a device's: the runtime applies them once per container,
// however many GPUs it has. Calls that bring the same edits at the same time share a look at the file, and a write where one is needed.
func (s *Store) WriteBase(edits specs.ContainerEdits) error {
	of := identityOf(edits)
	return s.bases.Do(of, func() error {
		s.mu.Lock()
		data, made := s.base, s.baseOf == of && s.base != nil
		s.mu.Unlock()
		if !made {
			var err error
			if data, err = encode(baseSpec(edits)); err != nil {
				return fmt.Errorf("CDI spec %s: %w", baseFile, err)
			}
			s.mu.Lock()
			s.base, s.baseOf = data, of
			s.mu.Unlock()
		}
		return s.write(baseFile, data)
	})
}

// WriteClaim makes devices those of the claim's spec. Each must have the claim's UID in its name: the runtime gives a device to whoever is told its name, so a
// claim's spec must never answer to another claim's.
func (s *Store) WriteClaim(uid types.UID, devices []ClaimDevice) error {
	name, err := claimFile(uid)
	if err != nil {
		return err
	}
	for _, d := range devices {
		if !strings.HasPrefix(d.Name, ClaimDeviceName(uid, "", nil)) {
			return fmt.Errorf("CDI spec %s: device %q is not the claim's: its name does not begin with the claim's UID", name, d.Name)
		}
	}
	data, err := encode(claimSpec(devices))
	if err != nil {
		return fmt.Errorf("CDI spec %s: %w", name, err)
	}
	return s.write(name, data)
}

// RemoveClaim removes a claim's spec. One that is not there is no error.
func (s *Store) RemoveClaim(uid types.UID) error {
	name, err := claimFile(uid)
	if err != nil {
		return err
	}
	return s.remove(name)
}

// RemoveBase removes the base spec, and what killed calls have left of it. One that is not there is no error. No other instance of the plugin may be
// writing it.
func (s *Store) RemoveBase() error {
	left, _ := filepath.Glob(filepath.Join(s.root, "."+baseFile+temporary+"*"))
	for _, path := range left {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove CDI spec: %w", err)
		}
	}
	return s.remove(baseFile)
}

// Claims lists the claims that have a spec, or of which a killed call left the beginning of one.
func (s *Store) Claims() ([]types.UID, error) {
	entries, err := os.ReadDir(s.root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list CDI specs: %w", err)
	}
	var uids []types.UID
	for _, e := range entries {
		name := e.Name()
		if begun, ok := strings.CutSuffix(name, ofClaim); ok {
			name = strings.TrimPrefix(begun, ".")
		}
		if uid, ok := claimOf(name); ok {
			uids = append(uids, uid)
		}
	}
	slices.Sort(uids)
	return slices.Compact(uids), nil
}

// isSpec says whether a file in the directory is one that this package could have made.
func isSpec(name string) bool {
	_, claim := claimOf(name)
	return claim || name == baseFile
}

func claimOf(name string) (types.UID, bool) {
	rest, ok := strings.CutPrefix(name, claimPrefix)
	if !ok {
		return "", false
	}
	uid, ok := strings.CutSuffix(rest, suffix)
	return types.UID(uid), ok && uid != ""
}

// claimFile refuses a UID that would lead out of the directory. The API server's UIDs never do.
func claimFile(uid types.UID) (string, error) {
	if uid == "" || strings.ContainsAny(string(uid), "/\x00") {
		return "", fmt.Errorf("claim UID %q cannot name a file", uid)
	}
	return claimPrefix + string(uid) + suffix, nil
}

func (s *Store) write(name string, data []byte) error {
	defer s.changing(name)()
	path := filepath.Join(s.root, name)
	on, err := os.ReadFile(path)
	differs := err != nil || !bytes.Equal(on, data)
	if differs {
		if err := replace(path, data); err != nil {
			return fmt.Errorf("write CDI spec: %w", err)
		}
	}
	s.wrote(name, data, differs)
	return nil
}

// wrote notes what a file holds now, and whether it was another's doing that it did not.
func (s *Store) wrote(name string, data []byte, differed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.known[name] = data
	if s.lost[name] && differed {
		s.mended = append(s.mended, name)
	}
	delete(s.lost, name)
}

func (s *Store) remove(name string) error {
	defer s.changing(name)()
	s.mu.Lock()
	delete(s.known, name)
	delete(s.lost, name)
	s.mu.Unlock()
	path := filepath.Join(s.root, name)
	for _, path := range []string{path, unfinished(path)} {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove CDI spec: %w", err)
		}
	}
	return nil
}

// changing keeps the file, and what is known of it, to the caller until he calls what it returns.
func (s *Store) changing(name string) (changed func()) {
	s.files.RLock()
	if name != baseFile {
		return s.files.RUnlock
	}
	s.baseMu.Lock()
	return func() {
		s.baseMu.Unlock()
		s.files.RUnlock()
	}
}

// encode completes a spec, with the lowest version that can express it, and makes sure that a runtime can load it: older ones refuse versions they don't know.
func encode(spec *specs.Spec) ([]byte, error) {
	version, err := specs.MinimumRequiredVersion(spec)
	if err != nil {
		return nil, fmt.Errorf("find its version: %w", err)
	}
	spec.Version = version
	if err := validate(spec); err != nil {
		return nil, err
	}
	data, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	if isPlain(data) {
		return data, nil
	}
	if _, err := cdilib.ParseSpec(data); err != nil {
		return nil, fmt.Errorf("the runtime could not read it: %w", err)
	}
	return data, nil
}

// isPlain says whether JSON is in printable ASCII. A runtime reads specs as YAML, of which that is a part, while other characters may be none of YAML's. Its
// parser takes longer than all else that is done for a spec, and so is asked only where there are such.
func isPlain(data []byte) bool {
	return !slices.ContainsFunc(data, func(b byte) bool { return b < ' ' || b > '~' })
}

// validate holds a spec to the rules that the CDI library applies when a runtime loads it. One bad device costs the runtime the whole file.
func validate(spec *specs.Spec) error {
	if len(spec.Devices) == 0 {
		return errors.New("it has no devices")
	}
	if err := (&cdilib.ContainerEdits{ContainerEdits: &spec.ContainerEdits}).Validate(); err != nil {
		return fmt.Errorf("its common edits: %w", err)
	}
	seen := map[string]bool{}
	for i := range spec.Devices {
		d := &spec.Devices[i]
		if err := parser.ValidateDeviceName(d.Name); err != nil {
			return err
		}
		if seen[d.Name] {
			return fmt.Errorf("device %s is in it twice", d.Name)
		}
		seen[d.Name] = true
		if isEmpty(d.ContainerEdits) {
			return fmt.Errorf("device %s changes nothing, which CDI refuses", d.Name)
		}
		if err := (&cdilib.ContainerEdits{ContainerEdits: &d.ContainerEdits}).Validate(); err != nil {
			return fmt.Errorf("device %s: %w", d.Name, err)
		}
	}
	return nil
}

func isEmpty(e specs.ContainerEdits) bool {
	return len(e.Env)+len(e.DeviceNodes)+len(e.Hooks)+len(e.Mounts)+len(e.NetDevices)+len(e.AdditionalGIDs) == 0 && e.IntelRdt == nil
}

// replace puts data at path so that a reader sees all of it or the file that was there. CDI reads only *.json and *.yaml,
// so the temporary file is no spec to anyone. There is no fsync: the directory is on tmpfs or is rewritten from records after a crash.
func replace(path string, data []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := create(path)
	if err != nil {
		return about(path, err)
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return about(path, err)
}

// about names the file that was to be written. The temporary file has another name with each try, and
// who reports only new errors would report each try.
func about(path string, err error) error {
	var file *fs.PathError
	var link *os.LinkError
	switch {
	case errors.As(err, &file):
		return &fs.PathError{Op: file.Op, Path: path, Err: file.Err}
	case errors.As(err, &link):
		return &fs.PathError{Op: link.Op, Path: path, Err: link.Err}
	}
	return err
}

// create makes the temporary file for path. A claim's has a fixed name, because calls for one claim follow each other, in all processes: what a killed one
// left is removed by the next, and not written to, whatever it is. The base spec may be written by two instances at once.
func create(path string) (*os.File, error) {
	if _, claim := claimOf(filepath.Base(path)); !claim {
		return os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+temporary+"*")
	}
	const anew = os.O_CREATE | os.O_EXCL | os.O_WRONLY
	f, err := os.OpenFile(unfinished(path), anew, 0o600)
	if !errors.Is(err, fs.ErrExist) {
		return f, err
	}
	if err := os.Remove(unfinished(path)); err != nil {
		return nil, err
	}
	return os.OpenFile(unfinished(path), anew, 0o600)
}

// unfinished is the temporary file of a claim's spec.
func unfinished(path string) string {
	return filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+ofClaim)
}
