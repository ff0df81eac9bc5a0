package fleet

import (
	"archive/tar"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// manifestFile is the archive's first file. The other files have one kind of object each.
const manifestFile = "manifest.json"

// maxArchive limits what is read from an archive, so that a crafted one cannot fill the memory.
const maxArchive = 1 << 30

// Manifest describes an archive.
type Manifest struct {
	// Format is the version of the archive's form.
	Format  int             `json:"format"`
	Program string          `json:"program"`
	Time    metav1.Time     `json:"time"`
	Version string          `json:"kubernetes"`
	Gates   map[string]bool `json:"featureGates,omitempty"`
	Files   []ArchivedFile  `json:"files"`
	// LeftOut is [Snapshot.Missing], with the kinds of objects that exceed the size limit.
	LeftOut []string `json:"leftOut,omitempty"`
	// PodsRedacted means that Pods have only their names, claims and nodes.
	PodsRedacted bool `json:"podsRedacted"`
}

// ArchivedFile is one file of an archive.
type ArchivedFile struct {
	Name   string `json:"name"`
	Bytes  int    `json:"bytes"`
	SHA256 string `json:"sha256"`
}

const archiveFormat = 1

// ArchiveOptions say what goes into an archive.
type ArchiveOptions struct {
	// Program is the version of the program that writes.
	Program string
	Time    time.Time
	// Pods keeps what the scheduler looks at in Pods. Otherwise only names, claims and nodes stay.
	Pods bool
	// MaxBytes limits the size of all files before compression. The least important ones are left out.
	MaxBytes int
	// Logs are the least important of all.
	Logs []Log
}

// files lists the kinds of objects in an archive, the most important ones first.
func (s *Snapshot) files() []archived {
	return []archived{
		{"resourceslices.json", Slices, &s.Slices}, {"resourceclaims.json", Claims, &s.Claims},
		{"deviceclasses.json", Classes, &s.Classes}, {"nodes.json", Nodes, &s.Nodes},
		{"devicetaintrules.json", TaintRules, &s.TaintRules}, {"configs.json", Configs, &s.Configs},
		{"settings.json", Configs, &s.Settings}, {"daemonsets.json", DaemonSets, &s.DaemonSets},
		{"resourceclaimtemplates.json", Templates, &s.Templates}, {"pods.json", Pods, &s.Pods},
	}
}

type archived struct {
	name    string
	kind    Kind
	objects any
}

// WriteArchive writes the snapshot as a tar.gz.
func (s *Snapshot) WriteArchive(w io.Writer, o ArchiveOptions) (Manifest, error) {
	m := Manifest{
		Format: archiveFormat, Program: o.Program, Time: metav1.NewTime(o.Time.UTC()), Version: s.Version, Gates: s.Gates,
		LeftOut: append([]string(nil), s.Missing...), PodsRedacted: !o.Pods,
	}
	kept := *s
	if !o.Pods {
		kept.Pods = redactPods(s.Pods)
	}
	total := 0
	contents := map[string][]byte{}
	put := func(name, what string, content []byte) {
		if o.MaxBytes > 0 && total+len(content) > o.MaxBytes {
			m.LeftOut = append(m.LeftOut, fmt.Sprintf("%s: the %d bytes exceed the archive's limit of %d in total (--max-bytes)",
				what, len(content), o.MaxBytes))
			return
		}
		total += len(content)
		contents[name] = content
		sum := sha256.Sum256(content)
		m.Files = append(m.Files, ArchivedFile{name, len(content), hex.EncodeToString(sum[:])})
	}
	for _, f := range kept.files() {
		content, err := json.Marshal(f.objects)
		if err != nil {
			return m, fmt.Errorf("encode %s: %w", f.name, err)
		}
		put(f.name, string(f.kind), content)
	}
	for _, log := range o.Logs {
		put("logs/"+log.Name+".log", "log "+log.Name, log.Text)
	}
	text, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return m, err
	}
	zip := gzip.NewWriter(w)
	out := tar.NewWriter(zip)
	add := func(name string, content []byte) error {
		header := &tar.Header{Name: "gpu-gather/" + name, Mode: 0o644, Size: int64(len(content)), ModTime: o.Time}
		if err := out.WriteHeader(header); err != nil {
			return err
		}
		_, err := out.Write(content)
		return err
	}
	if err := add(manifestFile, text); err != nil {
		return m, err
	}
	for _, f := range m.Files {
		if err := add(f.Name, contents[f.Name]); err != nil {
			return m, err
		}
	}
	return m, errors.Join(out.Close(), zip.Close())
}

// redactPods returns the Pods with nothing but names, claims, node and phase.
func redactPods(pods []*corev1.Pod) []*corev1.Pod {
	var kept []*corev1.Pod
	for _, p := range pods {
		if len(p.Spec.ResourceClaims) == 0 && p.Status.ExtendedResourceClaimStatus == nil {
			continue
		}
		kept = append(kept, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name, UID: p.UID},
			Spec:       corev1.PodSpec{NodeName: p.Spec.NodeName, ResourceClaims: p.Spec.ResourceClaims},
			Status: corev1.PodStatus{
				Phase: p.Status.Phase, ResourceClaimStatuses: p.Status.ResourceClaimStatuses,
				ExtendedResourceClaimStatus: p.Status.ExtendedResourceClaimStatus,
			},
		})
	}
	return kept
}

// ReadArchive reads an archive that [Snapshot.WriteArchive] wrote.
func ReadArchive(path string) (*Snapshot, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	s, err := readArchive(f)
	if err != nil {
		return nil, fmt.Errorf("%s is no complete archive of `kubectl gpu gather`: %w", path, err)
	}
	if err := s.Need(Slices, Claims, Nodes); err != nil {
		return nil, fmt.Errorf("archive %s: %w", path, err)
	}
	return s, nil
}

func readArchive(r io.Reader) (*Snapshot, error) {
	zip, err := gzip.NewReader(r)
	if err != nil {
		return nil, err
	}
	s := &Snapshot{Configs: map[string]string{}, Settings: map[string]string{}}
	var m Manifest
	into := map[string]any{manifestFile: &m}
	for _, f := range s.files() {
		into[f.name] = f.objects
	}
	sums := map[string]string{}
	parts := newSharer()
	files := tar.NewReader(io.LimitReader(zip, maxArchive))
	for {
		header, err := files.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		name := header.FileInfo().Name()
		target, known := into[name]
		if !known {
			continue
		}
		sum := sha256.New()
		content := io.TeeReader(files, sum)
		if err := decode(content, target, parts); err != nil {
			return nil, fmt.Errorf("file %s: %w", name, err)
		}
		if _, err := io.Copy(io.Discard, content); err != nil {
			return nil, fmt.Errorf("file %s: %w", name, err)
		}
		sums[name] = hex.EncodeToString(sum.Sum(nil))
	}
	if sums[manifestFile] == "" {
		return nil, fmt.Errorf("it has no %s", manifestFile)
	}
	if m.Format != archiveFormat {
		return nil, fmt.Errorf("its format is %d, and this program reads %d: use the kubectl-gpu that wrote it", m.Format, archiveFormat)
	}
	for _, f := range m.Files {
		if _, known := into[f.Name]; known && sums[f.Name] != f.SHA256 {
			return nil, fmt.Errorf("file %s is missing or altered", f.Name)
		}
	}
	s.dropNull()
	s.Version, s.Gates, s.Missing = m.Version, m.Gates, m.LeftOut
	// The slices already have the taints of the rules.
	rules := s.TaintRules
	s.TaintRules = nil
	s.prepare()
	s.TaintRules = rules
	return s, nil
}

// decode reads the JSON of one file. Slices share their parts one by one, because those of a large
// fleet together would need much memory.
func decode(r io.Reader, into any, parts *sharer) error {
	d := json.NewDecoder(r)
	all, big := into.(*[]*resourceapi.ResourceSlice)
	if !big {
		return d.Decode(into)
	}
	if open, err := d.Token(); err != nil || open == nil { // nil is null
		return err
	}
	for d.More() {
		var slice *resourceapi.ResourceSlice
		if err := d.Decode(&slice); err != nil {
			return err
		}
		if slice != nil {
			parts.slice(slice)
			*all = append(*all, slice)
		}
	}
	_, err := d.Token()
	return err
}

// dropNull removes null objects, which only a damaged archive has.
func (s *Snapshot) dropNull() {
	s.Nodes, s.Claims = withoutNull(s.Nodes), withoutNull(s.Claims)
	s.Classes, s.Templates, s.Pods = withoutNull(s.Classes), withoutNull(s.Templates), withoutNull(s.Pods)
	s.DaemonSets, s.TaintRules = withoutNull(s.DaemonSets), withoutNull(s.TaintRules)
}

func withoutNull[T any](all []*T) []*T {
	return slices.DeleteFunc(all, func(o *T) bool { return o == nil })
}
