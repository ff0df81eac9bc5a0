package settings

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// decode reads one YAML document into the structure that into points to, and then calls validate.
// Its error names each wrong field with its line.
func decode(raw []byte, into any, validate func() field.ErrorList) error {
	var tree yaml.Node
	if err := yaml.Unmarshal(raw, &tree); err != nil {
		return err // has the line
	}
	decoder := yaml.NewDecoder(bytes.NewReader(raw))
	decoder.KnownFields(true)
	err := decoder.Decode(into)
	if misfits := new(yaml.TypeError); errors.As(err, &misfits) {
		all := make([]error, len(misfits.Errors))
		for i, text := range misfits.Errors {
			all[i] = errors.New(explain(text, &tree))
		}
		return errors.Join(all...)
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if err := decoder.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return errors.New("there is a second YAML document after ---: want one")
	}
	var all []error
	for _, err := range validate() {
		all = append(all, fmt.Errorf("line %d: %w", lineOf(&tree, err.Field), err))
	}
	return errors.Join(all...)
}

var (
	lineForm    = regexp.MustCompile(`^line (\d+): (.*)$`)
	unknownForm = regexp.MustCompile(`^field (.*) not found in type .*$`)
	misfitForm  = regexp.MustCompile(`^cannot unmarshal !!(\w+)(?: (.*))? into .*$`)
)

// kinds says in plain words what the YAML tags are.
var kinds = map[string]string{
	"str": "a text", "seq": "a list", "map": "a map", "int": "a number", "float": "a number", "bool": "a Boolean", "timestamp": "a date",
}

// explain returns an error of the YAML decoder with the field, and without names of Go types.
func explain(text string, tree *yaml.Node) string {
	parts := lineForm.FindStringSubmatch(text)
	if parts == nil {
		return text
	}
	line, _ := strconv.Atoi(parts[1])
	problem := parts[2]
	if m := unknownForm.FindStringSubmatch(problem); m != nil {
		problem = fmt.Sprintf("unknown field %q", m[1])
	} else if m := misfitForm.FindStringSubmatch(problem); m != nil {
		problem = fmt.Sprintf("%s does not fit here", kinds[m[1]])
		if m[2] != "" {
			problem = m[2] + " is " + problem
		}
	}
	if at := fieldOn(tree, line, nil); at != nil {
		problem = at.String() + ": " + problem
	}
	return fmt.Sprintf("line %d: %s", line, problem)
}

// fieldOn returns the first field on the line, or nil if there is none. at is the path of n.
func fieldOn(n *yaml.Node, line int, at *field.Path) *field.Path {
	for i, child := range n.Content {
		below := at
		switch {
		case n.Kind == yaml.SequenceNode:
			below = at.Index(i)
		case n.Kind == yaml.MappingNode && i%2 == 0:
			if below = at.Child(child.Value); child.Line == line {
				return below
			}
			continue
		case n.Kind == yaml.MappingNode:
			below = at.Child(n.Content[i-1].Value)
		}
		if child.Kind == yaml.ScalarNode && child.Line == line {
			return below
		}
		if found := fieldOn(child, line, below); found != nil {
			return found
		}
	}
	return nil
}

var stepForm = regexp.MustCompile(`[^.\[\]]+|\[[^\]]*\]`)

// lineOf returns the line of the field with this path, or of the innermost field above it that the
// document has.
func lineOf(tree *yaml.Node, path string) int {
	n, line := tree, 1
	if len(tree.Content) > 0 {
		n = tree.Content[0]
	}
	for _, step := range stepForm.FindAllString(path, -1) {
		if n.Kind == yaml.AliasNode {
			n = n.Alias
		}
		name := regexp.MustCompile(`^\[(.*)\]$`).ReplaceAllString(step, "$1")
		if i, err := strconv.Atoi(name); n.Kind == yaml.SequenceNode && err == nil && i < len(n.Content) {
			n = n.Content[i]
			line = n.Line
			continue
		}
		i := slices.IndexFunc(n.Content, func(key *yaml.Node) bool { return key.Value == name })
		if n.Kind != yaml.MappingNode || i < 0 || i+1 >= len(n.Content) {
			return line
		}
		line, n = n.Content[i].Line, n.Content[i+1]
	}
	return line
}
