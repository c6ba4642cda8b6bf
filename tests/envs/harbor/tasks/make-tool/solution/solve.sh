#!/bin/bash
printf '#!/bin/bash\necho "${1^^}"\n' > shout
chmod +x shout
echo bash > /logs/artifacts/done.txt
